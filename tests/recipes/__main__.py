"""`python -m tests.recipes`: what Seamark does by default with each recipe, as a table. Minutes on two cores."""

from __future__ import annotations

import sys

from tests.harness import recipes


def main(versions: list[str]) -> int:
    """Exit status 1 if a recipe's verdict is not the one in its file."""
    found = recipes.read()
    changed = 0
    for version in versions:
        told, _ = recipes.verdicts(found.values(), version)
        changed += sum(told[number] != recipe.expects(version) for number, recipe in found.items())
        print("\n".join(recipes.table(found, told, version)[:-1]))
        print("Left out, since vLLM itself does not have them:", "; ".join(recipes.left_out(found)))
        if changed:
            print(f"{changed} verdicts are not those that the recipes' files expect")
        print(recipes.table(found, told, version)[-1])
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [recipes.NEWEST]))
