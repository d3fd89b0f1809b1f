"""Whole programs: standard input to standard output."""

from __future__ import annotations

import random

from palaestra.envs.suites.code.authoring import Cases, Family, ProgramDraft, draw_texts, fixed, generator

KIND = "program"


def word_table(text: str, *, top: int, shortest: int, mark: str) -> str:
    """The most frequent words with their counts."""
    counts: dict[str, int] = {}
    for raw in text.lower().split():
        word = "".join(character for character in raw if character.isalpha())
        if len(word) >= shortest:
            counts[word] = counts.get(word, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:top]
    return "".join(f"{word}{mark}{count}\n" for word, count in ranked) or "nothing\n"


def _word_table(rng: random.Random) -> ProgramDraft:
    top, shortest, mark = rng.randint(2, 4), rng.randint(2, 4), rng.choice([" ", ": ", ",", " x "])
    text = "The the cat cats, sat on a mat. CAT! it's 42 and dog dog; fox (fox) over under tea"
    words = text.split()

    def draw(r: random.Random) -> str:
        return (
            "\n".join(" ".join(r.choice(words) for _ in range(r.randint(3, 9))) for _ in range(r.randint(1, 3))) + "\n"
        )

    return ProgramDraft(
        word_table,
        f"""
        The input is a text. Lower-case it, split it at white space and remove everything but letters from each piece;
        pieces with fewer than {shortest} letters left don't count. Print the {top} most frequent words (all, when there
        are fewer), the most frequent first, equally frequent ones in alphabetical order, one a line as
        `word{mark}count`. Print `nothing` when there is none.
        """,
        draw_texts(rng, draw, edges=["", "1 2 3\n", "b" * shortest + " " + "a" * shortest]),
        rules={"top": top, "shortest": shortest, "mark": mark},
    )


def run_ledger(text: str, *, deposit: str, withdraw: str, move: str, floor: int) -> str:
    """Balances after all commands, and how many were refused."""
    balances: dict[str, int] = {}
    refused = 0
    for line in text.splitlines():
        match line.split():
            case [verb, name, amount] if verb == deposit:
                balances[name] = balances.get(name, 0) + int(amount)
            case [verb, name, amount] if verb == withdraw:
                if name in balances and balances[name] - int(amount) >= floor:
                    balances[name] -= int(amount)
                else:
                    refused += 1
            case [verb, name, other, amount] if verb == move:
                if name in balances and other in balances and balances[name] - int(amount) >= floor:
                    balances[name] -= int(amount)
                    balances[other] += int(amount)
                else:
                    refused += 1
    return "".join(f"{name} {balances[name]}\n" for name in sorted(balances)) + f"refused {refused}\n"


def _run_ledger(rng: random.Random) -> ProgramDraft:
    deposit, withdraw, move = rng.choice([("in", "out", "move"), ("pay", "take", "send"), ("add", "sub", "give")])
    floor, names = rng.choice([0, -50, 10]), rng.sample(["ann", "bob", "cid", "dee", "eve"], 3)

    def draw(r: random.Random) -> str:
        lines = []
        for _ in range(r.randint(3, 9)):
            verb, amount = r.choice([deposit, deposit, withdraw, move]), r.randint(1, 90)
            middle = r.sample(names, 2) if verb == move else [r.choice(names)]
            lines.append(" ".join([verb, *middle, str(amount)]))
        return "\n".join(lines) + "\n"

    a, b = names[:2]
    edges = ["", f"{withdraw} {a} 1\n", f"{deposit} {a} 20\n{withdraw} {a} {20 - floor}\n{withdraw} {a} 1\n"]
    edges.append(f"{deposit} {a} 70\n{move} {a} {a} 5\n{move} {a} {b} 5\n")
    return ProgramDraft(
        run_ledger,
        f"""
        A ledger. Each line of the input is a command with a positive whole amount:

        - `{deposit} NAME AMOUNT` adds to an account and opens it when it doesn't exist yet
        - `{withdraw} NAME AMOUNT` takes from an account
        - `{move} NAME OTHER AMOUNT` moves from one account to another, possibly the same

        Taking and moving are refused when an account doesn't exist, or when the balance minus the amount would be below
        {floor}. At the end print a line `NAME BALANCE` for each account in alphabetical order, and then
        `refused COUNT`.
        """,
        draw_texts(rng, draw, edges=edges, hidden=9),
        rules={"deposit": deposit, "withdraw": withdraw, "move": move, "floor": floor},
    )


def draw_table(text: str, *, mark: str, right: bool, gap: str, line_mark: str) -> str:
    """Aligned columns with a line under the header."""
    rows = [[cell.strip() for cell in line.split(mark)] for line in text.splitlines() if line.strip()]
    if not rows:
        return ""
    count = max(len(row) for row in rows)
    rows = [row + [""] * (count - len(row)) for row in rows]
    widths = [max(len(row[index]) for row in rows) for index in range(count)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) if right else cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(gap.join(cells).rstrip())
    lines.insert(1, gap.join(line_mark * width for width in widths))
    return "\n".join(lines) + "\n"


def _draw_table(rng: random.Random) -> ProgramDraft:
    mark, right = rng.choice(",;|"), rng.random() < 0.5
    gap, line_mark = rng.choice(["  ", " | ", " : "]), rng.choice("-=~")

    def draw(r: random.Random) -> str:
        width = r.randint(2, 4)
        cells = ["id", "name", " 7", "1024", "", "Lima", "north side", "ok "]
        rows = [[r.choice(cells) for _ in range(width - (r.random() < 0.2))] for _ in range(r.randint(2, 5))]
        return "\n".join(mark.join(["key", *row]) for row in rows) + "\n"

    side = "right" if right else "left"
    return ProgramDraft(
        draw_table,
        f"""
        Each line of the input is a row of cells separated by `{mark}`; the first row is the header. White space around
        cells doesn't count, blank lines are skipped, and rows with fewer cells than the longest row are filled up with
        empty cells. Print the rows aligned: each column is as wide as its widest cell, cells are aligned to the
        {side}, columns are separated by `{gap}`. Under the header print a line in which each column is filled with
        `{line_mark}`. Print nothing for an empty input.
        """,
        draw_texts(rng, draw, edges=["", "only\n", f"a{mark}b\n\n  \n1\n", f"{mark}x\nlonger{mark}\n"], hidden=8),
        rules={"mark": mark, "right": right, "gap": gap, "line_mark": line_mark},
    )


def run_stack(text: str) -> str:
    """A reverse Polish calculator, one expression a line."""
    answers = []
    for line in text.splitlines():
        stack: list[int] = []
        answer = ""
        for word in line.split():
            if word.removeprefix("-").isdigit():
                stack.append(int(word))
                continue
            if word not in ("+", "-", "*", "/") or len(stack) < 2:
                answer = "error"
                break
            right, left = stack.pop(), stack.pop()
            if word == "/" and right == 0:
                answer = "division by zero"
                break
            stack.append({"+": left + right, "-": left - right, "*": left * right}.get(word, left // (right or 1)))
        if not answer:
            answer = str(stack[0]) if len(stack) == 1 else "error"
        answers.append(answer)
    return "".join(f"{answer}\n" for answer in answers)


def draw_histogram(text: str) -> str:
    """Vertical bars of stars over the labels."""
    bars = [line.rsplit(maxsplit=1) for line in text.splitlines() if line.strip()]
    heights = [int(height) for _, height in bars]
    lines = []
    for level in range(max(heights, default=0), 0, -1):
        lines.append("".join("*" if height >= level else " " for height in heights).rstrip())
    lines.append("".join(label[0] for label, _ in bars))
    return "".join(f"{line}\n" for line in lines)


FAMILIES: tuple[Family, ...] = (
    generator(KIND, "word-table", _word_table),
    generator(KIND, "ledger", _run_ledger),
    generator(KIND, "table", _draw_table),
    fixed(
        KIND,
        "rpn",
        ProgramDraft(
            run_stack,
            """
            A calculator in reverse Polish notation. Each line of the input is an expression of whole numbers (an
            optional `-` and digits) and the operators `+ - * /`, separated by white space; `/` divides and rounds down.
            Print one line for each: the result, or `division by zero` as soon as that happens, or `error` when a word
            is unknown, an operator lacks operands, or not exactly one number is left. An empty line is an error.
            """,
            Cases(
                ["3 4 +\n2 3 4 * -\n", "1 0 /\n+\n"],
                [
                    "",
                    "\n",
                    "-7\n",
                    "1 2\n1 2 + +\n",
                    "-7 2 /\n7 -2 /\n",
                    "2 x *\n1 0 / y\n",
                    "5 1 2 + 4 * + 3 -\n",
                    "99999999999 99999999999 *\n- 1\n--1\n",
                ],
            ),
        ),
    ),
    fixed(
        KIND,
        "histogram",
        ProgramDraft(
            draw_histogram,
            """
            Each line of the input is a label (one or more words) and a height >= 0, separated by white space. Draw a
            histogram of upright bars of `*`, one column a bar, in order, as high as the highest bar; under them a line
            with the first character of each label. Blank lines are skipped. Without bars print one empty line.
            """,
            Cases(
                ["ann 2\nbob 1\n", "x 0\ny 3\n"],
                ["", "solo 1\n", "zero 0\n", "a 1\n\nb 2\n\nc 3\n", "new york 2\nrome  4\n", "a 5\nb 0\nc 5\n"],
            ),
        ),
    ),
)
