"""What the names of models in workers' lists mean: which are one model, and which template a name is rendered by.

A worker that is vLLM has one engine: all names in its list that are no adapters are that engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

MOST_NAMES = 4  # of models, in a line of the log or an error: adapters may be many


class ListedNames(NamedTuple):
    bases: tuple[tuple[str, ...], ...] = ()  # of base models, those of one model together, in the list's order
    templates: Mapping[str, str] = {}  # the base model whose chat template a listed name is rendered by

    @property
    def base(self) -> str:
        """The model of requests that name none; empty if nothing is listed."""
        return self.bases[0][0] if self.bases else ""


def listed_names(cards: Sequence[Mapping[str, Any]], *, one_engine: bool) -> ListedNames:
    """The names in a list of models as OpenAI's API answers it; vLLM gives an adapter its base model as `parent`."""
    base = [card["id"] for card in cards if not card.get("parent")]
    adapters = {card["id"]: card["parent"] for card in cards if card.get("parent")}
    bases = (tuple(base),) if one_engine and base else tuple((name,) for name in base)
    templates = {name: names[0] for names in bases for name in names}
    for name, parent in adapters.items():
        templates.setdefault(name, templates.get(parent, name))
    return ListedNames(bases, templates)


def name_keys(listed: Iterable[ListedNames]) -> dict[str, str]:
    """One name, for each name in the lists of several workers, that all names of the same model have in common.

    Names are of the same model if a worker lists them as one. It depends on no order: gateways share what they keep
    under it.
    """
    groups: list[set[str]] = []
    adapters: set[str] = set()
    for each in listed:
        adapters.update(each.templates)
        for names in each.bases:
            touched = [group for group in groups if not group.isdisjoint(names)]
            groups = [*(group for group in groups if group.isdisjoint(names)), set(names).union(*touched)]
    return {name: name for name in adapters} | {name: min(group) for group in groups for name in group}


def chosen_for(name: str, models: Iterable[str]) -> str:
    """The one of several models that takes the requests for a name which none of them has: the same one each time."""
    seed = xxh3_64_intdigest(name.encode(errors="surrogatepass"))
    return min(models, key=lambda model: xxh3_64_intdigest(model.encode(errors="surrogatepass"), seed))


def some_of(names: Sequence[str]) -> str:
    """A list of names, or its beginning and how many there are beside."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def length_in(card: Mapping[str, Any]) -> int:
    """Tokens that a prompt and its answer may have together; 0: the card does not say."""
    length = card.get("max_model_len")
    return length if type(length) is int else 0


def union_of_models(listed: Iterable[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """The models of several lists, each once, as the first one describes it that takes the longest prompts."""
    union: dict[Any, Mapping[str, Any]] = {}
    for card in (card for cards in listed for card in cards):
        if length_in(card) > length_in(union.setdefault(card["id"], card)):
            union[card["id"]] = card
    return list(union.values())
