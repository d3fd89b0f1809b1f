"""Turn text into values: durations, query strings, log lines, INI, CSV, numerals."""

from __future__ import annotations

import random

from palaestra.envs.suites.code.authoring import Cases, Family, FunctionDraft, draw_calls, fixed, generator

KIND = "parse"


def parse_duration(text: str, *, units: dict[str, int]) -> int | None:
    """Seconds, or None for anything malformed."""
    total, digits, used = 0, "", set()
    for character in text:
        if character in "0123456789":
            digits += character
        elif digits and character in units and character not in used:
            total += int(digits) * units[character]
            used.add(character)
            digits = ""
        else:
            return None
    return total if used and not digits else None


def _duration(rng: random.Random) -> FunctionDraft:
    letters = rng.choice(["wdhm", "dhms", "hms", "ydh", "wdm"])
    seconds = {"y": 365 * 86400, "w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}
    if rng.random() < 0.5:  # A working day or week is shorter.
        seconds |= {"d": rng.choice([7, 8]) * 3600, "w": rng.choice([4, 5]) * 8 * 3600}
    units = {letter: seconds[letter] for letter in letters}

    def draw(r: random.Random) -> tuple[str]:
        chosen = [letter for letter in letters if r.random() < 0.7] or [letters[0]]
        return ("".join(f"{r.randint(0, 40)}{letter}" for letter in chosen),)

    first, last = letters[0], letters[-1]
    edges = [("",), ("5",), (first,), (f"1{first}2",), (f"1{first}1{first}",), (f"1{last}1{first}",), (f"-1{last}",)]
    edges += [(f"1 {first}",), (f"007{last}",)]
    table = ", ".join(f"`{letter}` = {value} seconds" for letter, value in units.items())
    return FunctionDraft(
        parse_duration,
        f"""
        Parse a duration such as `3{first}20{last}` into seconds. It is a sequence of one or more numbers, each followed
        by a unit: {table}. Units may come in any order, each at most once. Return None for anything else (the empty
        text, a number without a unit, a unit without a number, an unknown character or a repeated unit).
        """,
        draw_calls(rng, draw, edges=edges, hidden=13),
        name=rng.choice(["parse_duration", "duration_seconds", "to_seconds"]),
        rules={"units": units},
    )


def parse_query(text: str, *, pair_mark: str, value_mark: str, space_mark: str) -> dict[str, list[str]]:
    """Key to its values in order; keys without a value have the value ''."""
    found: dict[str, list[str]] = {}
    for pair in text.split(pair_mark):
        if pair:
            key, _, value = pair.replace(space_mark, " ").partition(value_mark)
            found.setdefault(key, []).append(value)
    return found


def _query(rng: random.Random) -> FunctionDraft:
    pair_mark, value_mark, space_mark = rng.choice("&;|"), rng.choice("=:~"), rng.choice("+_^")
    keys = rng.sample(["q", "page", "sort", "lang", "tag", "user", "from", "size"], 4)
    values = ["1", "20", f"new{space_mark}york", "", "de", f"a{value_mark}b", "x/y"]

    def draw(r: random.Random) -> tuple[str]:
        return (pair_mark.join(f"{r.choice(keys)}{value_mark}{r.choice(values)}" for _ in range(r.randint(1, 5))),)

    key = keys[0]
    edges = [("",), (key,), (f"{pair_mark}{key}{value_mark}1{pair_mark}{pair_mark}",), (f"{value_mark}x",)]
    edges += [(pair_mark.join([key, f"{key}{value_mark}{space_mark}"]),)]
    return FunctionDraft(
        parse_query,
        f"""
        Parse a query string in an old dialect. Pairs are separated by `{pair_mark}`; empty pairs are ignored. A pair is
        a key and a value separated by its first `{value_mark}`; without one the value is the empty string.
        `{space_mark}` stands for a space, in keys and values. Return a dict from each key to the list of its values in
        order.
        """,
        draw_calls(rng, draw, edges=edges),
        name=rng.choice(["parse_query", "query_values", "read_query"]),
        rules={"pair_mark": pair_mark, "value_mark": value_mark, "space_mark": space_mark},
    )


def parse_log(line: str, *, order: list[str], opening: str, closing: str, levels: list[str]) -> dict[str, str] | None:
    """The fields of one line, or None where it is malformed."""
    fields, rest = {}, line.strip()
    for name in order:
        if not rest.startswith(opening) or closing not in rest:
            return None
        fields[name], _, rest = rest[len(opening) :].partition(closing)
        rest = rest.lstrip(" ")
    if fields["level"] not in levels or not rest:
        return None
    return {**fields, "message": rest}


def _log(rng: random.Random) -> FunctionDraft:
    order = rng.sample(["time", "level", rng.choice(["module", "thread", "host"])], 3)
    opening, closing = rng.choice([("[", "]"), ("<", ">"), ("(", ")"), ("{", "}")])
    levels = rng.choice([["INFO", "WARN", "ERROR"], ["debug", "info", "error"], ["I", "W", "E", "F"]])
    values = {"time": ["12:00:01", "23:59"], "level": [*levels, "TRACE"], "module": ["db", "net.http", ""]}
    values |= {"thread": ["main", "pool-1"], "host": ["web-1", "10.0.0.7"]}
    messages = ["started", f"took {opening}3{closing} s", "", "user ann logged in", f"bad {closing}"]

    def draw(r: random.Random) -> tuple[str]:
        head = [f"{opening}{r.choice(values[name])}{closing}" for name in order]
        return (r.choice([" ", ""]).join(head) + " " + r.choice(messages),)

    good = " ".join(f"{opening}{values[name][0]}{closing}" for name in order)
    edges = [("",), (good,), (f"  {good}   spaced  out  ",), (good[1:] + " x",), (good[:-1] + " x",)]
    example = " ".join(f"{opening}{name}{closing}" for name in order)
    return FunctionDraft(
        parse_log,
        f"""
        Parse a log line of the form `{example} message`. White space around the line is ignored; between the parts
        there may be any number of spaces, or none. Each field goes up to the first `{closing}` and may be empty. The
        level must be one of {", ".join(levels)}, and the message must not be empty. Return a dict with the keys
        {", ".join(f"`{name}`" for name in order)} and `message`, or None for any other line.
        """,
        draw_calls(rng, draw, edges=edges, visible=4, hidden=12),
        name=rng.choice(["parse_log", "log_fields", "parse_line"]),
        rules={"order": order, "opening": opening, "closing": closing, "levels": levels},
    )


def parse_record(line: str, *, fields: list[tuple[str, int, str]]) -> dict[str, int | str | None]:
    """Fixed-width columns to values."""
    record: dict[str, int | str | None] = {}
    position = 0
    for name, width, sort in fields:
        text = line[position : position + width].strip()
        position += width
        record[name] = (int(text) if text else None) if sort == "number" else text
    return record


def _record(rng: random.Random) -> FunctionDraft:
    names = rng.sample(["sku", "name", "stock", "price", "shelf", "supplier", "weight"], 4)
    numeric = {"stock", "price", "shelf", "weight"}
    fields = [(name, rng.randint(4, 9), "number" if name in numeric else "text") for name in names]

    def draw(r: random.Random) -> tuple[str]:
        parts = []
        for _, width, sort in fields:
            text = str(r.randint(0, 10 ** (width - 1))) if sort == "number" else r.choice(["ax", "b c", "Q-7", "zinc"])
            text = r.choice([text[:width], text[:width], ""])
            parts.append(text.rjust(width) if sort == "number" else text.ljust(width))
        return ("".join(parts),)

    full = "".join("9" * width if sort == "number" else "w" * width for _, width, sort in fields)
    edges = [("",), (full,), (full + " 99",), (full[: fields[0][1]],), (full[: fields[0][1] + 2],)]
    table = "\n".join(f"- `{name}`: {width} characters, {sort}" for name, width, sort in fields)
    return FunctionDraft(
        parse_record,
        f"Parse a line with columns of fixed width, without separators:\n\n{table}\n\nReturn a dict from column to "
        "value. Strip white space from each column. A number becomes an int, or None where the column is blank. A line "
        "that is too short has blank columns at its end; what follows the last column is ignored.",
        draw_calls(rng, draw, edges=edges),
        name=rng.choice(["parse_record", "read_columns", "record_of"]),
        rules={"fields": fields},
    )


def parse_ini(text: str) -> dict[str, dict[str, str]]:
    """Sections to options; options before the first section belong to ''."""
    sections: dict[str, dict[str, str]] = {}
    section = ""
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        if line[0] == "[" and line[-1] == "]":
            section = line[1:-1].strip()
            sections.setdefault(section, {})
        else:
            key, equals, value = line.partition("=")
            if equals:
                sections.setdefault(section, {})[key.strip().lower()] = value.strip()
    return sections


def from_roman(numeral: str) -> int | None:
    """Value of a canonical Roman numeral, or None."""
    values = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC")]
    values += [(50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
    total, position = 0, 0
    for value, letters in values:
        most = 3 if value in (1000, 100, 10, 1) else 1
        while most and numeral.startswith(letters, position):
            total, position, most = total + value, position + len(letters), most - 1
    # Greedy reading takes some non-canonical numerals (IXI, VIV): writing the value again gives them away.
    rest, canonical = total, ""
    for value, letters in values:
        canonical += letters * (rest // value)
        rest %= value
    return total if numeral and canonical == numeral else None


def csv_fields(line: str) -> list[str]:
    """The fields of one CSV line (RFC 4180: a quoted field may hold commas, and quotes written twice)."""
    fields, field, quoted, position = [], "", False, 0
    while position < len(line):
        character = line[position]
        if quoted and character == '"' and line[position + 1 : position + 2] == '"':
            field += '"'
            position += 1
        elif character == '"' and (quoted or not field):
            quoted = not quoted
        elif character == "," and not quoted:
            fields.append(field)
            field = ""
        else:
            field += character
        position += 1
    return [*fields, field]


def version_key(text: str) -> tuple[int, int, int, int, str] | None:
    """A key that sorts versions: a release comes after its pre-releases."""
    core, dash, suffix = text.partition("-")
    numbers = core.split(".")
    if len(numbers) != 3 or not all(n.isascii() and n.isdigit() and (n == "0" or n[0] != "0") for n in numbers):
        return None
    if dash and not suffix:
        return None
    return (int(numbers[0]), int(numbers[1]), int(numbers[2]), 0 if dash else 1, suffix)


def split_url(url: str) -> dict[str, str]:
    """Scheme, host, port, path, query and fragment; absent parts are ''."""
    rest, _, fragment = url.partition("#")
    rest, _, query = rest.partition("?")
    scheme, mark, after = rest.partition("://")
    if not mark:
        scheme, after = "", rest
    authority, slash, path = after.partition("/") if mark else ("", "", after)
    host, _, port = authority.rpartition("@")[2].partition(":")
    return {
        "scheme": scheme.lower(),
        "host": host.lower(),
        "port": port,
        "path": slash + path,
        "query": query,
        "fragment": fragment,
    }


FAMILIES: tuple[Family, ...] = (
    generator(KIND, "duration", _duration),
    generator(KIND, "query", _query),
    generator(KIND, "log-line", _log),
    generator(KIND, "fixed-width", _record),
    fixed(
        KIND,
        "ini",
        FunctionDraft(
            parse_ini,
            """
            Parse an INI file into a dict of sections, each a dict from option to value (text). White space around
            lines, section names, options and values is ignored; so are empty lines, lines that begin with `#` or `;`,
            and lines without `=` that are no `[section]`. Options are lower-cased and go up to the first `=`; a later
            one replaces an earlier one of its section. Sections may be empty, and may come again. Options before the
            first section belong to the section `''`, which exists only then.
            """,
            Cases(
                [("[db]\nHost = a.example\nport=5432\n",), ("debug=1\n[x]\n",), ("# note\n\n[a b]\nk = v = w",)],
                [
                    ("",),
                    ("[only]",),
                    ("a=\n=b\n",),
                    ("[s]\nk=1\n[t]\nk=2\n[s]\nK=3\nj=4",),
                    ("  ; x=1\n  [ pad ]  \n  key   =   two words  ",),
                    ("nonsense\n[s]\nalso nonsense\nok=yes",),
                    ("[x]\r\na=1\r\n\r\nb=#2",),
                ],
            ),
        ),
    ),
    fixed(
        KIND,
        "roman",
        FunctionDraft(
            from_roman,
            "The value of a Roman numeral in capital letters, 1 to 3999. Only the usual subtractive form counts: "
            "return None for anything else, such as `IIII`, `VX` or the empty text.",
            Cases(
                [("XIV",), ("MCMXC",), ("IIII",)],
                [("I",), ("",), ("MMMCMXCIX",), ("CDXLIV",), ("VX",), ("IXI",), ("MMMM",), ("xiv",), ("IC",), ("VIV",)],
            ),
        ),
    ),
    fixed(
        KIND,
        "csv-line",
        FunctionDraft(
            csv_fields,
            'Split one CSV line into its fields. A field that begins with `"` is quoted: it ends at the next single '
            '`"`, may contain commas, and a `"` inside it is written twice. Elsewhere a `"` is an ordinary character. '
            "Nothing "
            "is stripped; the empty line has one empty field.",
            Cases(
                [("a,b,c",), ('1,"x, y",2',), ('"say ""hi""",ok',)],
                [
                    ("",),
                    (",",),
                    ('""',),
                    ('"",""',),
                    (' a , "b" ',),
                    ('"a""","",c',),
                    ('x"y,z',),
                    ('"1,2,3"',),
                    ("ü,é,",),
                ],
            ),
        ),
    ),
    fixed(
        KIND,
        "version",
        FunctionDraft(
            version_key,
            "A sort key for versions `major.minor.patch` with an optional `-suffix`: the tuple (major, minor, patch, "
            "1, '') for a release and (major, minor, patch, 0, suffix) for a pre-release. The suffix is everything "
            "after the first `-` and must not be empty. The three numbers consist of ASCII digits without leading "
            "zeros. Return None for anything else.",
            Cases(
                [("1.2.3",), ("2.0.0-rc1",), ("1.2",)],
                [("0.0.0",), ("1.02.3",), ("1.2.3-",), ("10.20.30-a-b",), ("1.2.3.4",), ("v1.2.3",), ("",), ("1..3",)],
            ),
        ),
    ),
    fixed(
        KIND,
        "url",
        FunctionDraft(
            split_url,
            """
            Split a URL into a dict with the keys `scheme`, `host`, `port`, `path`, `query` and `fragment`, all text,
            `''` where absent. The fragment follows the first `#`, the query the first `?` before it. With `://` the
            scheme stands before it, and host and port up to the next `/`, which begins the path; what precedes an `@`
            in the host part is dropped; the port follows the first `:` after that. Without `://` there is only a path.
            Scheme and host are lower-cased.
            """,
            Cases(
                [("https://Example.org:8080/a/b?x=1#top",), ("/just/path",), ("http://host",)],
                [
                    ("",),
                    ("HTTP://ann:pw@Host.net/",),
                    ("ftp://h?q",),
                    ("a#b?c",),
                    ("a?b?c#d#e",),
                    ("s3://bucket/key/with:colon",),
                    ("x://:99",),
                    ("http://h/p?u=http://other/",),
                ],
            ),
        ),
    ),
)
