"""Calculate: units, taxes, calendars, checksums, small linear algebra."""

from __future__ import annotations

import math
import random

from palaestra.envs.suites.code.authoring import Cases, Family, FunctionDraft, draw_calls, fixed, generator

KIND = "compute"


def convert(amount: int, source: str, target: str, *, factors: dict[str, int]) -> tuple[int, int] | None:
    """Whole target units, and what is left over in the smallest unit."""
    if source not in factors or target not in factors:
        return None
    return divmod(amount * factors[source], factors[target])


_UNIT_NAMES = (
    ["line", "page", "chapter", "volume"],
    ["cup", "jug", "barrel", "tank"],
    ["tick", "beat", "bar", "song"],
    ["bit", "frame", "clip", "reel"],
)


def _convert(rng: random.Random) -> FunctionDraft:
    names = rng.choice(_UNIT_NAMES)
    steps = [rng.randint(3, 24) for _ in names[1:]]
    factors = {names[0]: 1}
    for name, step, smaller in zip(names[1:], steps, names, strict=False):
        factors[name] = factors[smaller] * step

    def draw(r: random.Random) -> tuple[int, str, str]:
        return r.randint(0, 2000), r.choice(names), r.choice(names)

    table = ", ".join(f"1 {n} = {s} {small}" for n, s, small in zip(names[1:], steps, names, strict=False))
    edges = [
        (0, names[0], names[3]),
        (5, names[2], names[2]),
        (1, "mile", names[0]),
        (1, names[0], ""),
        (7, names[3], names[0]),
    ]
    return FunctionDraft(
        convert,
        f"""
        Convert an amount >= 0 between units: {table}. Return (whole, rest): how many whole target units the amount
        holds, and what is left over, counted in {names[0]}s. Return None when a unit is unknown.
        """,
        draw_calls(rng, draw, edges=edges),
        name=rng.choice(["convert", "convert_units", "whole_units"]),
        rules={"factors": factors},
    )


def tax(income: int, children: int, *, brackets: list[tuple[int, int]], top: int, allowance: int) -> int:
    """Tax on a whole income with progressive brackets; each bracket's share is rounded down."""
    taxable = max(0, income - allowance * children)
    total, lower = 0, 0
    for upper, percent in brackets:
        total += max(0, min(taxable, upper) - lower) * percent // 100
        lower = upper
    return total + max(0, taxable - lower) * top // 100


def _tax(rng: random.Random) -> FunctionDraft:
    uppers = sorted(rng.sample(range(4000, 60000, 500), 3))
    percents = sorted(rng.sample(range(48), 4))
    brackets, top, allowance = list(zip(uppers, percents[:3], strict=True)), percents[3], rng.randrange(300, 3000, 50)
    lowers = [0, *uppers[:2]]
    table = "\n".join(
        f"- what lies above {low} and up to {high}: {percent} percent"
        for low, (high, percent) in zip(lowers, brackets, strict=True)
    )
    edges = [(0, 0), (allowance, 1), (allowance, 2), *((upper, 0) for upper in uppers), (uppers[2] + 1, 0), (10**7, 5)]
    return FunctionDraft(
        tax,
        f"The tax on a yearly income, both in whole coins. First {allowance} are taken off the income for each child; "
        f"it doesn't fall below 0. Then\n\n{table}\n- what lies above {uppers[2]}: {top} percent\n\nThe share of each "
        "bracket is rounded down to whole coins before the shares are added.",
        draw_calls(rng, lambda r: (r.randint(0, uppers[2] * 2), r.randint(0, 4)), edges=edges, hidden=13),
        name=rng.choice(["tax", "income_tax", "tax_due"]),
        rules={"brackets": brackets, "top": top, "allowance": allowance},
    )


def check_character(code: str, *, weights: list[int], modulus: int, alphabet: str) -> str | None:
    """The check character of a code, or None when the code holds anything but digits."""
    if not code or not all(digit in "0123456789" for digit in code):
        return None
    total = sum(int(digit) * weights[i % len(weights)] for i, digit in enumerate(reversed(code)))
    return alphabet[-total % modulus]


def _check_character(rng: random.Random) -> FunctionDraft:
    modulus = rng.choice([10, 11, 13, 17, 23])
    weights = rng.sample(range(2, 10), rng.randint(2, 5))
    alphabet = "0123456789XYZABCDEFGHJK"[:modulus]

    def draw(r: random.Random) -> tuple[str]:
        return ("".join(r.choice("0123456789") for _ in range(r.randint(1, 12))),)

    return FunctionDraft(
        check_character,
        f"""
        The check character of a code of digits. Counted from the right, its digits are multiplied by the weights
        {", ".join(map(str, weights))}, which repeat from the start when they run out. The check value is the smallest
        number >= 0 that makes the sum of the products plus the check value divisible by {modulus}; the check character
        is that position (from 0) in `{alphabet}`. Return None when the code is empty or holds anything but the digits
        0 to 9.
        """,
        draw_calls(rng, draw, edges=[("",), ("0",), ("12a4",), (" 12",), ("9" * 20,), ("²",)]),
        name=rng.choice(["check_character", "check_digit", "control_sign"]),
        rules={"weights": weights, "modulus": modulus, "alphabet": alphabet},
    )


def add_days(date: tuple[int, int, int], days: int, *, lengths: list[int], leap_every: int) -> tuple[int, int, int]:
    """A date (year, month, day) of an invented calendar, moved by a number of days of either sign."""
    year, month, day = date
    day += days
    while True:
        length = lengths[month - 1] + (1 if month == len(lengths) and year % leap_every == 0 else 0)
        if day > length:
            day -= length
            month += 1
            if month > len(lengths):
                year, month = year + 1, 1
        elif day < 1:
            month -= 1
            if month < 1:
                year, month = year - 1, len(lengths)
            day += lengths[month - 1] + (1 if month == len(lengths) and year % leap_every == 0 else 0)
        else:
            return year, month, day


def _add_days(rng: random.Random) -> FunctionDraft:
    lengths = [rng.randint(18, 40) for _ in range(rng.randint(5, 9))]
    leap_every = rng.randint(3, 6)
    last, year = len(lengths), rng.randint(20, 400) * leap_every

    def draw(r: random.Random) -> tuple[tuple[int, int, int], int]:
        month = r.randint(1, last)
        return (r.randint(1, 1500), month, r.randint(1, lengths[month - 1])), r.randint(-400, 400)

    edges: list[tuple[tuple[int, int, int], int]] = [
        ((year, 1, 1), 0),
        ((year, 1, 1), -1),
        ((year, last, lengths[-1]), 1),
        ((year + 1, last, lengths[-1]), 1),
        ((year + 1, 1, 1), -1),
        ((year, last, lengths[-1] + 1), 1),
        ((year, 2, 3), 5 * sum(lengths)),
    ]
    return FunctionDraft(
        add_days,
        f"""
        In a fictional calendar the months of a year have {", ".join(map(str, lengths))} days. In years that are
        divisible by {leap_every} the last month has one day more. A date is a tuple (year, month, day), months and days
        counted from 1. Return the date that lies `days` later; earlier when `days` is negative.
        """,
        draw_calls(rng, draw, edges=edges, hidden=13),
        name=rng.choice(["add_days", "shift_date", "date_after"]),
        rules={"lengths": lengths, "leap_every": leap_every},
    )


def balance(deposit: int, months: int, *, yearly_per_mille: int, fee: int, bonus_months: int, bonus: int) -> int:
    """Cents after some months: interest first, then the fee, then the bonus."""
    cents = deposit
    for month in range(1, months + 1):
        cents += cents * yearly_per_mille // 12000
        cents = max(0, cents - fee)
        if month % bonus_months == 0:
            cents += bonus
    return cents


def _balance(rng: random.Random) -> FunctionDraft:
    rules = {
        "yearly_per_mille": rng.randint(5, 80),
        "fee": rng.randrange(20, 400, 5),
        "bonus_months": rng.randint(3, 12),
        "bonus": rng.randrange(100, 2500, 50),
    }
    period = rules["bonus_months"]
    edges = [(0, 0), (0, period), (0, period - 1), (12345, 0), (10**8, period * 3), (rules["fee"] - 1, 1)]
    return FunctionDraft(
        balance,
        f"""
        The balance of a savings account in cents after a number of months. Every month, in this order: interest of
        {rules["yearly_per_mille"]} per mille a year is added (a twelfth of it for the month, the result rounded down to
        whole cents); the fee of {rules["fee"]} cents is taken, but the balance doesn't fall below 0; and after every
        {period} months a bonus of {rules["bonus"]} cents is added.
        """,
        draw_calls(rng, lambda r: (r.randint(0, 500_000), r.randint(1, 60)), edges=edges),
        name=rng.choice(["balance", "savings", "balance_after"]),
        rules=rules,
    )


def days_between(start: str, end: str) -> int:
    """Days from one ISO date to another in the Gregorian calendar."""

    def day_number(text: str) -> int:
        year, month, day = (int(part) for part in text.split("-"))
        if month < 3:  # Count the year from March: February, and so the leap day, is then its end.
            year, month = year - 1, month + 12
        return 365 * year + year // 4 - year // 100 + year // 400 + (153 * (month - 3) + 2) // 5 + day

    return day_number(end) - day_number(start)


def multiply(left: list[list[int]], right: list[list[int]]) -> list[list[int]] | None:
    """The matrix product, or None when the shapes don't fit."""
    if any(len(row) != len(right) for row in left):
        return None
    columns = list(zip(*right, strict=True))
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in left]


def determinant(matrix: list[list[int]]) -> int:
    """Exact, by Bareiss' elimination without fractions."""
    rows, sign, previous = [list(row) for row in matrix], 1, 1
    size = len(rows)
    for k in range(size - 1):
        pivot = next((i for i in range(k, size) if rows[i][k]), None)
        if pivot is None:
            return 0
        if pivot != k:
            rows[k], rows[pivot], sign = rows[pivot], rows[k], -sign
        for i in range(k + 1, size):
            for j in range(k + 1, size):
                rows[i][j] = (rows[i][j] * rows[k][k] - rows[i][k] * rows[k][j]) // previous
        previous = rows[k][k]
    return sign * rows[-1][-1] if rows else 1


def percentile(values: list[int], percent: int) -> int | None:
    """Nearest rank: the smallest value with at least that share of the values at or below it."""
    if not values:
        return None
    rank = max(1, -(-percent * len(values) // 100))
    return sorted(values)[rank - 1]


def spread(samples: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the deviations are taken from the mean, not by the difference of squares."""
    if not samples:
        return 0.0, 0.0
    mean = math.fsum(samples) / len(samples)
    squares = math.fsum((sample - mean) ** 2 for sample in samples)
    return mean, math.sqrt(squares / (len(samples) - 1)) if len(samples) > 1 else 0.0


FAMILIES: tuple[Family, ...] = (
    generator(KIND, "units", _convert),
    generator(KIND, "tax", _tax),
    generator(KIND, "check-character", _check_character),
    generator(KIND, "calendar", _add_days),
    generator(KIND, "savings", _balance),
    fixed(
        KIND,
        "days-between",
        FunctionDraft(
            days_between,
            "The number of days from one date to another, both given as `YYYY-MM-DD` in the Gregorian calendar; "
            "negative when `end` is earlier. Don't use the modules `datetime` or `calendar`.",
            Cases(
                [("2024-01-01", "2024-01-31"), ("2023-12-31", "2024-01-01"), ("2024-02-28", "2024-03-01")],
                [
                    ("2023-02-28", "2023-03-01"),
                    ("1900-02-28", "1900-03-01"),
                    ("2000-02-28", "2000-03-01"),
                    ("2024-05-05", "2024-05-05"),
                    ("2024-03-01", "2023-03-01"),
                    ("1970-01-01", "2038-01-19"),
                    ("0001-01-01", "9999-12-31"),
                ],
            ),
        ),
    ),
    fixed(
        KIND,
        "matrix-product",
        FunctionDraft(
            multiply,
            "The product of two matrices, given as lists of rows with at least one row and one column each. Return "
            "None when the number of columns on the left differs from the number of rows on the right.",
            Cases(
                [([[1, 2], [3, 4]], [[5, 6], [7, 8]]), ([[1, 2]], [[1, 2]])],
                [
                    ([[3]], [[-7]]),
                    ([[1, 2, 3]], [[4], [5], [6]]),
                    ([[4], [5]], [[1, 2, 3]]),
                    ([[1, 0], [0, 1]], [[9, 8], [7, 6]]),
                    ([[1], [2]], [[1], [2]]),
                    ([[0, 0], [0, 0]], [[1, 1], [1, 1]]),
                    ([[2, -1, 3], [0, 5, -2]], [[1, 4], [-3, 2], [6, 0]]),
                ],
            ),
        ),
    ),
    fixed(
        KIND,
        "determinant",
        FunctionDraft(
            determinant,
            "The determinant of a square matrix of ints, as an exact int however large. The empty matrix has 1.",
            Cases(
                [([[1, 2], [3, 4]],), ([[2, 0, 0], [0, 3, 0], [0, 0, 4]],), ([[7]],)],
                [
                    ([],),
                    ([[0]],),
                    ([[0, 1], [1, 0]],),
                    ([[1, 2], [2, 4]],),
                    ([[0, 2, 1], [3, 0, 4], [1, 5, 0]],),
                    ([[10**9, 1, 0], [1, 10**9, 1], [0, 1, 10**9]],),
                    ([[0, 0, 1, 2], [0, 3, 1, 1], [4, 1, 0, 5], [1, 1, 1, 1]],),
                    ([[0, 1, 2], [0, 3, 4], [0, 5, 6]],),
                ],
            ),
        ),
    ),
    fixed(
        KIND,
        "spread",
        FunctionDraft(
            spread,
            "The mean and the sample standard deviation (divisor n - 1) of measurements, as two floats. The deviation "
            "of a single one is 0, and without measurements both are 0. Small differences between large values must "
            "not be lost; relative errors up to 1e-9 are tolerated.",
            Cases(
                [([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0],), ([1.5],)],
                [
                    ([],),
                    ([3.0, 3.0, 3.0],),
                    ([-1.0, 1.0],),
                    ([0.1, 0.2, 0.4],),
                    ([1e9 + 4.0, 1e9 + 7.0, 1e9 + 13.0, 1e9 + 16.0],),
                    ([1e-8, 3e-8, 2e-8],),
                    ([float(number * number) for number in range(30)],),
                ],
            ),
            uses=(math,),
            rel_tol=1e-9,
        ),
    ),
    fixed(
        KIND,
        "percentile",
        FunctionDraft(
            percentile,
            "The percentile (0 to 100) of a list of ints by the nearest-rank rule: the smallest of the values such "
            "that at least `percent` percent of all values are less than or equal to it. The 0th percentile is the "
            "smallest value. Return None for an empty list; leave the list as it is.",
            Cases(
                [([15, 20, 35, 40, 50], 30), ([15, 20, 35, 40, 50], 100), ([3, 1, 2], 50)],
                [
                    ([], 50),
                    ([8], 0),
                    ([8], 100),
                    ([4, 4, 4, 9], 75),
                    ([4, 4, 4, 9], 76),
                    ([5, 1], 0),
                    (list(range(100, 0, -1)), 29),
                    (list(range(1, 11)), 95),
                    (list(range(1, 11)), 10),
                ],
            ),
        ),
    ),
)
