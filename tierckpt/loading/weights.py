"""Chooses one set of weights in a directory that may hold several, as ``transformers`` does.

A set is a file, an index with the files it names, or numbered shards, of one base name and variant:

    model.safetensors                  model-00001-of-00002.safetensors        model.safetensors.index.json
    model.fp16.safetensors             model.fp16-00001-of-00002.safetensors   model.safetensors.index.fp16.json

Order: the sets ``model``, ``diffusion_pytorch_model`` and ``pytorch_model`` without a variant; files of other names,
together; one set of an adapter or of Mistral's names (``consolidated``), if it is the only one; one variant, if it is
the only one. Within a set a single file comes before an index, and an index before shards without one.

Source: ``_get_resolved_checkpoint_files`` of transformers 5, ``_get_checkpoint_shard_files`` of diffusers 0.36.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import CheckpointNotFoundError, IntegrityError

SUFFIX = ".safetensors"
_FIRST = ("model", "diffusion_pytorch_model", "pytorch_model")
_LAST = ("adapter_model", "consolidated", "pytorch_lora_weights")
_BASE = "|".join(_FIRST + _LAST)
_VARIANT = r"\d*[A-Za-z_][\w-]*?"
_SHARD = r"-(?P<number>\d+)-of-(?P<count>\d+)"
_FILE = re.compile(rf"(?P<base>{_BASE})(?:\.(?P<a>{_VARIANT}))?(?:{_SHARD})?(?:\.(?P<b>{_VARIANT}))?\.safetensors")
_INDEX = re.compile(
    rf"(?P<base>{_BASE})(?:\.(?P<a>{_VARIANT}))?\.safetensors(?:\.(?P<b>{_VARIANT}))?\.index(?:\.(?P<c>{_VARIANT}))?\.json"
)
_OTHER_INDEX = re.compile(r"(?P<base>.*)\.safetensors\.index\.json")


@dataclass(frozen=True, slots=True)
class Weights:
    """One set: an index, or files. Names in the directory."""

    files: tuple[str, ...] = ()
    index: str = ""


@dataclass(slots=True)
class _Set:
    base: str
    variant: str
    single: str = ""
    index: str = ""
    shards: dict[tuple[int, int], str] = field(default_factory=dict)
    """By count and number."""

    @property
    def names(self) -> list[str]:
        return [name for name in (self.single, self.index, *self.shards.values()) if name]

    def chosen(self, where: str) -> Weights:
        if self.single or self.index:
            return Weights((self.single,)) if self.single else Weights(index=self.index)
        counts = sorted({count for count, _ in self.shards})
        if len(counts) > 1:
            raise IntegrityError(
                f"{where} holds shards of {' and of '.join(map(str, counts))} files, and no index",
                hint="Remove the files of the other version, or fetch the model again: `tierckpt prefetch`",
                file=", ".join(self.names),
            )
        [count] = counts
        missing = [number for number in range(1, count + 1) if (count, number) not in self.shards]
        if missing:
            raise IntegrityError(
                f"{where} lacks shards {', '.join(map(str, missing))} of {count} of {self.base}",
                hint="Fetch the model again, whole: `tierckpt prefetch`",
                file=", ".join(self.names),
            )
        return Weights(tuple(self.shards[count, number] for number in range(1, count + 1)))


def is_weights(name: str) -> bool:
    """True for a file that is, or names, weights of a model."""
    return name.endswith(SUFFIX) or _INDEX.fullmatch(name) is not None or _OTHER_INDEX.fullmatch(name) is not None


def choose(where: str, names: Sequence[str], *, variant: str = "", index: str = "") -> Weights:
    """Return the set to load among the files ``names`` of the directory ``where``.

    Args:
        variant: of this variant, such as "fp16".
        index: this index, a name in the directory.

    Raises:
        IntegrityError: several sets, and none is preferred; or shards are missing.
        CheckpointNotFoundError: no such variant or index, or no safetensors file.
    """
    sets, others, other_indexes = _sets(names)
    if index:
        if index not in names:
            raise CheckpointNotFoundError(
                f"{where} has no {index}", hint=f"Its indexes: {_list(_indexes(names))}", file=index
            )
        return Weights(index=index)
    if variant:
        found = [one for base in _FIRST + _LAST for one in sets if (one.base, one.variant) == (base, variant)]
        if not found:
            there = sorted({one.variant for one in sets if one.variant})
            raise CheckpointNotFoundError(
                f"{where} has no weights of the variant {variant!r}",
                hint=f"It has {_list([repr(one) for one in there])}" if there else "Load it without variant=",
            )
        return found[0].chosen(where)
    plain = [one for one in sets if not one.variant]
    for base in _FIRST:
        for one in plain:
            if one.base == base:
                return one.chosen(where)
    if len(other_indexes) > 1:
        raise _several(where, other_indexes, f'index="{other_indexes[0]}"')
    if other_indexes:
        return Weights(index=other_indexes[0])
    if others:
        return Weights(tuple(others))
    if len(plain) > 1:
        files = [one.names[0] for one in plain]
        raise IntegrityError(
            f"{where} holds several sets of weights: {_list(files)}",
            hint="Give the file to load" if all(one.single for one in plain) else "Give the file, or index=, to load",
            file=", ".join(files),
        )
    if plain:
        return plain[0].chosen(where)
    if len(sets) > 1:
        raise _several(where, [one.names[0] for one in sets], f'variant="{sets[0].variant}"')
    if sets:
        return sets[0].chosen(where)
    raise CheckpointNotFoundError(
        f"no safetensors files in {where}", hint="`tierckpt export` makes them from a DCP checkpoint"
    )


def _several(where: str, files: Sequence[str], call: str) -> IntegrityError:
    return IntegrityError(
        f"{where} holds several sets of weights: {_list(files)}",
        hint=f"Choose one, such as load_safetensors(..., {call})",
        file=", ".join(files),
    )


def _sets(names: Sequence[str]) -> tuple[list[_Set], list[str], list[str]]:
    """Return the sets of known base names, and the files and indexes of other names."""
    sets: dict[tuple[str, str], _Set] = {}
    others, other_indexes = [], []
    for name in sorted(names):
        match = _FILE.fullmatch(name) or _INDEX.fullmatch(name)
        if match is None:
            others += [name] if name.endswith(SUFFIX) else []
            other_indexes += [name] if _OTHER_INDEX.fullmatch(name) else []
            continue
        groups = match.groupdict()
        variant = groups["a"] or groups["b"] or groups.get("c") or ""
        one = sets.setdefault((groups["base"], variant), _Set(groups["base"], variant))
        if name.endswith(".json"):
            one.index = one.index or name
        elif groups["number"]:
            one.shards[int(groups["count"]), int(groups["number"])] = name
        else:
            one.single = name
    return list(sets.values()), others, other_indexes


def _indexes(names: Sequence[str]) -> list[str]:
    return [name for name in names if _INDEX.fullmatch(name) or _OTHER_INDEX.fullmatch(name)]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
