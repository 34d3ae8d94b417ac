"""`python -m tests.recipes`: what Seamark does by default with each recipe, as a table. Minutes on two cores."""

from __future__ import annotations

import sys

from tests.harness import recipes


def main(versions: list[str]) -> int:
    """Exit status 1 if a recipe's verdict is not the one in its file."""
    found = list(recipes.read().values())
    forks = sorted({flag for recipe in found for flag in recipe.of_forks})
    print("Left out, since vLLM itself does not have them:", "; ".join(forks))
    changed = 0
    for version in versions:
        said = recipes.explained(found, version)
        told = [recipes.verdict(recipe, each, version) for recipe, each in zip(found, said, strict=True)]
        print(recipes.HEAD, *map(recipes.row, found, told), sep="\n")
        changed += sum(each != recipe.expects(version) for recipe, each in zip(found, told, strict=True))
        print(f"\n{changed} verdicts are not those that the recipes' files expect")
        print(recipes.count(sum(each.hits for each in told), len(found), version))
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [recipes.NEWEST]))
