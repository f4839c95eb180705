"""File selection of a prefetch."""

from __future__ import annotations

import pytest

from tierckpt.cache.file_set import FileSpec
from tierckpt.cache.prefetch import FileFilter


@pytest.mark.parametrize(
    ("include", "exclude", "chosen"),
    [
        (["a[1]"], [], ["a[1]"]),
        (["a[[]1]"], [], ["a[1]"]),
        (["a[12]"], [], ["a1"]),
        (["a?"], ["a[12]"], ["a*", "ab"]),
        ([], ["a[1]"], ["a#1?", "a*", "a1", "ab"]),
        (["a#1?"], [], ["a#1?"]),
    ],
)
def test_a_glob_that_names_an_existing_file_selects_it(
    include: list[str], exclude: list[str], chosen: list[str]
) -> None:
    files = [FileSpec(path, path, 1, None) for path in ("a#1?", "a*", "a1", "a[1]", "ab")]
    assert [file.path for file in FileFilter(tuple(include), tuple(exclude)).choose(files, "s3://bucket/m")] == chosen
