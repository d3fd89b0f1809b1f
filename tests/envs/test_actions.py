"""Model text to actions: one convention, and everything else is said to be wrong in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.envs.actions import (
    MAX_ACTIONS,
    ParseError,
    RunPython,
    RunShell,
    Submit,
    WriteFile,
    check_text,
    parse_blocks,
    render_blocks,
)

SEGMENT = st.text("abcXYZ019_-.", min_size=1, max_size=8).filter(lambda part: part not in (".", ".."))
PATHS = st.lists(SEGMENT, min_size=1, max_size=3).map("/".join)
BODIES = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


def test_every_kind_of_action_in_the_order_of_the_text() -> None:
    text = """First I look around.
```bash
ls -la
```
Then I write it:
```python path=pkg/solution.py
def f():
    return 1
```
and try it
```python
print(1)
```
<submit/>
That was it.
"""
    assert parse_blocks(text) == (
        RunShell("ls -la\n"),
        WriteFile("pkg/solution.py", "def f():\n    return 1\n"),
        RunPython("print(1)\n"),
        Submit(),
    )


@given(st.dictionaries(PATHS, BODIES, min_size=1, max_size=4), st.booleans())
def test_rendering_files_and_parsing_them_gives_the_files(files: dict[str, str], submit: bool) -> None:
    actions = parse_blocks(render_blocks(files, submit=submit))

    with_newlines = {path: text if text.endswith("\n") else text + "\n" for path, text in files.items()}
    written = [action for action in actions if isinstance(action, WriteFile)]
    assert [(action.path.removeprefix("./"), action.text) for action in written] == list(with_newlines.items())
    assert (actions[-1] == Submit()) is submit


@given(st.text() | st.text("`\n pythonbash=<submit/>.", max_size=60))
def test_no_text_does_anything_but_parse_or_say_what_is_wrong(text: str) -> None:
    try:
        actions = parse_blocks(text)
    except ParseError:
        return
    assert 1 <= len(actions) <= MAX_ACTIONS


@pytest.mark.parametrize(
    "info",
    ["python path=a.py", "path=a.py", "text path=a.py", 'python path="a.py"', "py path=/workspace/a.py", "path=./a.py"],
)
def test_a_path_makes_a_block_a_file_whatever_its_language(info: str) -> None:
    assert parse_blocks(f"```{info}\nx\n```") == (WriteFile("a.py", "x\n"),)


@pytest.mark.parametrize("info", ["", "json", "text", "javascript"])
def test_a_block_in_another_language_without_a_path_is_prose(info: str) -> None:
    assert parse_blocks(f"```{info}\nx\n```\n<submit/>") == (Submit(),)


def test_a_longer_fence_may_hold_a_shorter_one() -> None:
    assert parse_blocks("````md path=a.md\n```python\nx\n```\n````") == (WriteFile("a.md", "```python\nx\n```\n"),)


def test_a_submit_inside_a_block_or_a_sentence_is_text() -> None:
    with pytest.raises(ParseError, match="No action"):
        parse_blocks("I will write <submit/> later.\n```text\n<submit/>\n```")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "No action was found"),
        ("just prose", "No action was found"),
        ("```python\nprint(1)\n", "opened on line 1 is never closed"),
        ("```python path=../x.py\n```", "not one inside /workspace"),
        ("```python path=/etc/passwd\n```", "not one inside /workspace"),
        ("```python path=a//b\n```", "not one inside /workspace"),
        ("```python path=\n```", "has no usable path"),
        (f"```python path={'x' * 300}\n```", "longer than 255"),
        ("```bash\n\0\n```", "NUL"),
        ("\ud800", "surrogate"),
        ("<submit />", "No action was found"),
        ("```sh\nls\n```\n" * (MAX_ACTIONS + 1), "at most"),
    ],
)
def test_what_cannot_be_parsed_is_said_with_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse_blocks(text)


def test_an_action_that_is_no_text_is_the_callers_mistake() -> None:
    with pytest.raises(TypeError, match="an action is a str, got bytes"):
        check_text(b"x")  # type: ignore[arg-type]
