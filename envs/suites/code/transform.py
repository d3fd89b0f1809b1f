"""Reshape data: grouping, joining, flattening, cleaning, wrapping."""

from __future__ import annotations

import random
from typing import Any

from palaestra.envs.suites.code.authoring import Cases, Family, FunctionDraft, draw_calls, fixed, generator

KIND = "transform"

_TABLES: tuple[tuple[str, str, list[str]], ...] = (
    ("city", "sales", ["Oslo", "Rome", "Lima", "Graz", "Kyiv"]),
    ("team", "points", ["red", "blue", "green", "gold"]),
    ("host", "errors", ["web-1", "web-2", "db-1", "cache"]),
    ("sensor", "reading", ["north", "south", "attic", "cellar"]),
)


def summarise(rows: list[dict[str, Any]], *, key: str, value: str, how: str, least: int) -> list[tuple[str, int]]:
    """One figure a group, largest first; ties by name; small groups are left out."""
    groups: dict[str, list[int]] = {}
    for row in rows:
        if row.get(value) is not None:
            groups.setdefault(row[key], []).append(row[value])
    figures = {
        name: {
            "sum": sum(values),
            "maximum": max(values),
            "spread": max(values) - min(values),
            "rounded-down mean": sum(values) // len(values),
        }[how]
        for name, values in groups.items()
        if len(values) >= least
    }
    return sorted(figures.items(), key=lambda item: (-item[1], item[0]))


def _summarise(rng: random.Random) -> FunctionDraft:
    key, value, names = rng.choice(_TABLES)
    how, least = rng.choice(["sum", "maximum", "spread", "rounded-down mean"]), rng.randint(1, 3)

    def draw(r: random.Random) -> tuple[list[dict[str, Any]]]:
        rows: list[dict[str, Any]] = []
        for _ in range(r.randint(2, 9)):
            row: dict[str, Any] = {key: r.choice(names), value: r.randint(-9, 30)}
            if r.random() < 0.15:
                row[value] = None
            rows.append(row)
        return (rows,)

    tie = [{key: name, value: 4} for name in reversed(names) for _ in range(least)]
    edges = [([],), ([{key: names[0], value: None}],), ([{key: names[0]}] * 3,), (tie,)]
    return FunctionDraft(
        summarise,
        f"""
        Group rows by `{key}` and give the {how} of `{value}` in each group, as a list of tuples (`{key}`, figure). Rows
        in which `{value}` is None or missing don't count, and groups with fewer than {least} counted rows are left out.
        The largest figure comes first; equal ones are in alphabetical order.
        """,
        draw_calls(rng, draw, edges=edges),
        name=rng.choice(["summarise", "group_figures", "totals_by"]) + f"_{key}",
        rules={"key": key, "value": value, "how": how, "least": least},
    )


def aggregate_csv(text: str, *, key: str, value: str, mark: str) -> str:
    """A table with one line a key, in order of first appearance: key, number of rows, total."""
    header, *lines = text.strip().splitlines()
    columns = header.split(mark)
    key_at, value_at = columns.index(key), columns.index(value)
    totals: dict[str, list[int]] = {}
    for line in lines:
        cells = line.split(mark)
        if len(cells) == len(columns) and cells[value_at].strip().removeprefix("-").isdigit():
            total = totals.setdefault(cells[key_at].strip(), [0, 0])
            total[0] += 1
            total[1] += int(cells[value_at])
    return "\n".join([mark.join([key, "rows", "total"])] + [f"{k}{mark}{n}{mark}{t}" for k, (n, t) in totals.items()])


def _aggregate_csv(rng: random.Random) -> FunctionDraft:
    key, value, names = rng.choice(_TABLES)
    mark, other = rng.choice(",;|\t"), rng.choice(["note", "day", "user"])
    columns = rng.sample([key, value, other], 3)

    def draw(r: random.Random) -> tuple[str]:
        lines = [mark.join(columns)]
        for _ in range(r.randint(1, 7)):
            cells = {key: r.choice(names), value: str(r.randint(-20, 99)), other: r.choice(["", "x", "mon"])}
            if r.random() < 0.2:
                cells[value] = r.choice(["", "n/a", " 7 ", "1.5"])
            line = mark.join(cells[column] for column in columns)
            lines.append(line if r.random() < 0.9 else line + mark)
        return ("\n".join(lines) + r.choice(["", "\n"]),)

    shown = {",": "a comma", ";": "a semicolon", "|": "a bar `|`", "\t": "a tab"}[mark]
    return FunctionDraft(
        aggregate_csv,
        f"""
        `text` is a table: a header line and data lines, with {shown} between cells and no quoting. The order of the
        columns varies. Add up the column `{value}` for each value of the column `{key}`. Ignore data lines with another
        number of cells than the header, or whose `{value}` is no whole number (an optional `-` and digits; white space
        around a cell doesn't count). Return a table of the same form, without a final newline: the header
        `{key}`, `rows`, `total`, then a line for each `{key}` in order of its first counted line, with the number of
        counted lines and their total.
        """,
        draw_calls(rng, draw, edges=[(mark.join(columns),)], hidden=8),
        name=rng.choice(["aggregate", "add_up", "total_table"]),
        rules={"key": key, "value": value, "mark": mark},
    )


def flatten(value: dict[str, Any], *, joint: str, opening: str, closing: str) -> dict[str, Any]:
    """Nested dicts and lists as one dict from path to leaf; empty ones are leaves."""
    flat: dict[str, Any] = {}
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, dict) and (item or not path):
            children = [(f"{path}{joint}{name}" if path else name, child) for name, child in item.items()]
            pending += reversed(children)
        elif isinstance(item, list) and item:
            children = [(f"{path}{opening}{index}{closing}", child) for index, child in enumerate(item)]
            pending += reversed(children)
        else:
            flat[path] = item
    return flat


def _random_tree(rng: random.Random, keys: list[str], depth: int) -> Any:
    if depth == 0 or rng.random() < 0.25:
        return rng.choice([0, 7, -1, True, None, "text", "", [], {}])
    if rng.random() < 0.3:
        return [_random_tree(rng, keys, depth - 1) for _ in range(rng.randint(1, 3))]
    return {key: _random_tree(rng, keys, depth - 1) for key in rng.sample(keys, rng.randint(1, 3))}


def _flatten(rng: random.Random) -> FunctionDraft:
    joint = rng.choice([".", "/", "__", ":"])
    opening, closing = rng.choice([("[", "]"), ("<", ">"), ("#", ""), (joint, "")])
    keys = rng.sample(["id", "name", "tags", "owner", "size", "meta", "items", "path"], 5)

    def draw(r: random.Random) -> tuple[dict[str, Any]]:
        return ({key: _random_tree(r, keys, 3) for key in r.sample(keys, r.randint(1, 3))},)

    edges = [({},), ({keys[0]: {}},), ({keys[0]: [[]]},), ({keys[0]: {keys[1]: {keys[2]: 0}}},)]
    example = f"{keys[0]}{opening}1{closing}{joint}{keys[1]}"
    return FunctionDraft(
        flatten,
        f"""
        Flatten a nested dict into one dict from path to leaf. Names of nested dicts are
        joined with `{joint}`; an element of a list adds its index (from 0) to the path: `{example}` is `{keys[1]}` of
        element 1 of `{keys[0]}`. An empty list or an empty dict inside is a leaf; the empty dict itself gives `{{}}`.
        """,
        draw_calls(rng, draw, edges=edges),
        name=rng.choice(["flatten", "flat_paths", "flatten_config"]),
        rules={"joint": joint, "opening": opening, "closing": closing},
    )


def clean(
    records: list[dict[str, str]], *, required: str, number: str, default: int, renamed: str
) -> list[dict[str, Any]]:
    """Records with stripped text, a number, a renamed field; without duplicates and those without the required one."""
    cleaned: list[dict[str, Any]] = []
    seen = set()
    for record in records:
        row: dict[str, Any] = {name.strip().lower(): text.strip() for name, text in record.items()}
        identity = row.get(required, "").lower()
        if not identity or identity in seen:
            continue
        seen.add(identity)
        digits = row.pop(number, "")
        row[renamed] = int(digits) if digits.isdigit() else default
        cleaned.append(row)
    return cleaned


def _clean(rng: random.Random) -> FunctionDraft:
    required, number, other = (
        rng.sample(["email", "sku", "code"], 1) + rng.sample(["age", "stock", "seats"], 1) + ["city"]
    )
    default, renamed = rng.choice([0, -1, 1]), rng.choice(["count", "amount", "value"])
    names = ["a1", "B2", "b2", "c3 ", "", " ", "d4"]

    def draw(r: random.Random) -> tuple[list[dict[str, str]]]:
        records = []
        for _ in range(r.randint(1, 5)):
            record = {r.choice([required, required.upper(), f" {required}"]): r.choice(names)}
            if r.random() < 0.8:
                record[number] = r.choice(["7", " 42 ", "", "many", "-3"])
            if r.random() < 0.6:
                record[other.title()] = r.choice(["Rome", "  Oslo", ""])
            records.append(record)
        return (records,)

    edges: list[tuple[list[dict[str, str]]]] = [([],), ([{}],), ([{required: "x"}, {required: " X "}],)]
    return FunctionDraft(
        clean,
        f"""
        Clean records, dicts of text. Strip white space from field names and values and lower-case the names. Drop
        records without `{required}` (missing or blank), and those whose `{required}` equals, whatever the case of its
        letters, that of a record kept before. Replace the field `{number}` by `{renamed}`: its value as an int when it
        consists of digits only, otherwise {default}, also when it is missing. Return new dicts, the records in their
        own order.
        """,
        draw_calls(rng, draw, edges=edges),
        name=rng.choice(["clean", "clean_records", "normalise"]),
        rules={"required": required, "number": number, "default": default, "renamed": renamed},
    )


def join_tables(
    left: list[dict[str, Any]], right: list[dict[str, Any]], *, on: str, keep_unmatched: bool, filler: str, prefix: str
) -> list[dict[str, Any]]:
    """Left rows with the matching right ones."""
    extra = sorted({name for row in right for name in row if name != on})
    joined = []
    for row in left:
        matches = [other for other in right if other[on] == row[on]]
        if not matches and keep_unmatched:
            matches = [{}]
        for other in matches:
            joined.append({**row, **{prefix + name: other.get(name, filler) for name in extra}})
    return joined


def _join_tables(rng: random.Random) -> FunctionDraft:
    on, keep_unmatched = rng.choice(["id", "user", "code"]), rng.random() < 0.5
    filler, prefix = rng.choice(["", "?", "none"]), rng.choice(["r_", "other_", "b."])
    left_name, right_names = rng.choice(["name", "title"]), rng.sample(["price", "rank", "zone"], 2)

    def draw(r: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        left = [{on: r.randint(1, 5), left_name: r.choice("pqrs")} for _ in range(r.randint(1, 4))]
        right: list[dict[str, Any]] = []
        for _ in range(r.randint(0, 4)):
            row: dict[str, Any] = {on: r.randint(1, 5)}
            row |= {name: r.randint(0, 9) for name in right_names if r.random() < 0.8}
            right.append(row)
        return left, right

    one, two = {on: 1, left_name: "p"}, {on: 2, left_name: "q"}
    edges: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
        ([], [{on: 1}]),
        ([one, two], []),
        ([one, one], [{on: 1, right_names[0]: 3}, {on: 1, right_names[1]: 4}]),
    ]
    unmatched = (
        f"A left row without a match appears once, with {filler!r} for each of those columns."
        if keep_unmatched
        else "A left row without a match is left out."
    )
    return FunctionDraft(
        join_tables,
        f"""
        Join two lists of rows on the column `{on}`. For each left row in order, and each matching right row in order,
        the result has a row with the left row's columns and then all other columns that occur anywhere in `right`, in
        alphabetical order, each with `{prefix}` before its name; where the right row lacks one, its value is
        {filler!r}. {unmatched}
        """,
        draw_calls(rng, draw, edges=edges),
        name=rng.choice(["join_tables", "join_rows", "merge_tables"]),
        rules={"on": on, "keep_unmatched": keep_unmatched, "filler": filler, "prefix": prefix},
    )


def run_lengths(text: str) -> list[tuple[str, int]]:
    """Runs of equal characters."""
    runs: list[tuple[str, int]] = []
    for character in text:
        if runs and runs[-1][0] == character:
            runs[-1] = (character, runs[-1][1] + 1)
        else:
            runs.append((character, 1))
    return runs


def wrap(text: str, width: int) -> list[str]:
    """Greedy wrapping; words longer than a line are cut."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) <= width:
            line = f"{line} {word}"
            continue
        if line:
            lines.append(line)
        while len(word) > width:
            lines.append(word[:width])
            word = word[width:]
        line = word
    return [*lines, line] if line else lines


def transpose(rows: list[list[int]]) -> list[list[int | None]]:
    """Columns of ragged rows; what is missing is None."""
    width = max((len(row) for row in rows), default=0)
    return [[row[index] if index < len(row) else None for row in rows] for index in range(width)]


def invert_index(documents: dict[str, str]) -> dict[str, list[str]]:
    """Word to the sorted names of the documents that hold it."""
    index: dict[str, list[str]] = {}
    for name in sorted(documents):
        for word in sorted({part.strip(".,;:!?").lower() for part in documents[name].split()}):
            if word:
                index.setdefault(word, []).append(name)
    return index


FAMILIES: tuple[Family, ...] = (
    generator(KIND, "group-figures", _summarise),
    generator(KIND, "csv-totals", _aggregate_csv),
    generator(KIND, "flatten", _flatten),
    generator(KIND, "clean-records", _clean),
    generator(KIND, "join", _join_tables),
    fixed(
        KIND,
        "run-lengths",
        FunctionDraft(
            run_lengths,
            "Run-length encode a text: a list of tuples (character, how many times it stands in a row), in order.",
            Cases(
                [("aaabcc",), ("x",), ("abab",)],
                [("",), ("aaaa",), ("  \n",), ("aabbaa",), ("Aa",), ("1112",), ("z" * 120 + "y",)],
            ),
        ),
    ),
    fixed(
        KIND,
        "wrap",
        FunctionDraft(
            wrap,
            "Wrap a text into lines of at most `width` >= 1 characters. Words are separated by any white space; each "
            "line takes as many words as fit, with single spaces between them. A word longer than the width begins on "
            "a new line and is cut into pieces of full width; what is left of it begins the next line, which further "
            "words may join. A text without words gives no lines.",
            Cases(
                [("the quick brown fox", 10), ("a bb  ccc\ndddd", 4), ("abcdefgh ij", 5)],
                [
                    ("", 5),
                    ("   ", 1),
                    ("abc", 1),
                    ("exact fit", 9),
                    ("exact fit", 8),
                    ("to abcdefghij k", 4),
                    ("one", 80),
                    ("aa bb cc dd ee", 5),
                    ("x\ty\nz", 3),
                    ("abcdef gh", 3),
                ],
            ),
        ),
    ),
    fixed(
        KIND,
        "transpose",
        FunctionDraft(
            transpose,
            "Turn rows into columns. Rows may have different lengths: a row that is too short has None in the columns "
            "that it lacks. There are as many columns as the longest row has cells.",
            Cases(
                [([[1, 2], [3, 4]],), ([[1, 2, 3], [4]],)],
                [([],), ([[]],), ([[], [1]],), ([[5]],), ([[1], [2], [3]],), ([[1, 2, 3]],), ([[1], [2, 3], []],)],
            ),
        ),
    ),
    fixed(
        KIND,
        "inverted-index",
        FunctionDraft(
            invert_index,
            "Build an inverted index: a dict from each word to the alphabetical list of the names of the documents "
            "that contain it. Words are separated by white space and lower-cased; the characters "
            "`.,;:!?` are stripped from both ends, and what is then empty is no word.",
            Cases(
                [({"a": "red fish", "b": "blue fish"},), ({"n": "Stop! stop..."},)],
                [
                    ({},),
                    ({"x": ""},),
                    ({"x": "... !"},),
                    ({"z": "one", "a": "One", "m": "ONE two"},),
                    ({"d": "it's well-known: yes, it's"},),
                    ({"b": "b a", "a": "a.b c"},),
                ],
            ),
        ),
    ),
)
