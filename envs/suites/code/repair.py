"""Repair a file that is wrong in one place: the bugs that engineers make.

Each recipe is a right function of ours and a choice of bugs, each a change to its text. The calls in ``exposed_by`` go
wrong with the bug; the first is a visible case, the second a hidden one.
"""

from __future__ import annotations

import random

from palaestra.envs.suites.code.authoring import Bug, Family, FunctionDraft, draw_calls, generator

KIND = "repair"


def first_at_least(values: list[int], wanted: int) -> int:
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def _binary_search(rng: random.Random) -> FunctionDraft:
    base = rng.randint(-20, 20)
    values = sorted(base + rng.randint(0, 30) for _ in range(rng.randint(5, 8)))
    beyond = (values, values[-1] + rng.randint(1, 9))
    equal: tuple[list[int], int] = ([base - 1, base, base, base + 4], base)
    stepped: tuple[list[int], int] = ([base, base + 1, base + 2, base + 3], base + 2)
    bug = rng.choice(
        [
            Bug("low, high = 0, len(values)", "low, high = 0, len(values) - 1", (beyond, ([base], base + 1))),
            Bug("if values[middle] < wanted:", "if values[middle] <= wanted:", (equal, ([base], base))),
            Bug(
                "            high = middle\n",
                "            high = middle - 1\n",
                (stepped, ([base, base + 2], base + 1)),
            ),
        ]
    )

    def draw(r: random.Random) -> tuple[list[int], int]:
        numbers = sorted(r.randint(-50, 50) for _ in range(r.randint(2, 12)))
        return numbers, r.choice([r.choice(numbers), r.randint(-60, 60)])

    return FunctionDraft(
        first_at_least,
        "`values` is sorted. Return the first position whose value is at least `wanted`, `len(values)` when there is "
        "none. It must take logarithmic time.",
        draw_calls(rng, draw, edges=[([], base), ([1, 1, 1, 1], 1), ([1, 1, 1, 1], 2)], visible=2, hidden=8),
        name=rng.choice(["first_at_least", "lower_bound", "find_position", "insert_position"]),
        bug=bug,
    )


def rolling_means(values: list[int], *, window: int, digits: int) -> list[float]:
    means = []
    for end in range(window, len(values) + 1):
        part = values[end - window : end]
        means.append(round(sum(part) / len(part), digits))
    return means


def _rolling_means(rng: random.Random) -> FunctionDraft:
    window, digits = rng.randint(2, 5), rng.choice([1, 2])
    base = rng.randint(1, 20)
    rising, odd = [base + 3 * i * i for i in range(window + 2)], [base] * (window - 1) + [base + 1]
    bug = rng.choice(
        [
            Bug("len(values) + 1)", "len(values))", ((rising,), (odd,))),
            Bug("values[end - window : end]", "values[end - window + 1 : end]", ((rising,), (odd,))),
            Bug("values[end - window : end]", "values[end - window : end + 1]", ((rising,), (rising[::-1],))),
            Bug("sum(part) / len(part)", "sum(part) // len(part)", ((odd,), ([*odd, base + 1],))),
        ]
    )

    def draw(r: random.Random) -> tuple[list[int]]:
        return ([r.randint(-40, 90) for _ in range(r.randint(window, window + 6))],)

    return FunctionDraft(
        rolling_means,
        f"The mean of every {window} neighbouring values, in order, rounded to {digits} decimal(s) as `round` does. "
        f"Fewer than {window} values have no means.",
        draw_calls(rng, draw, edges=[([],), ([5] * (window - 1),), ([5] * window,)], visible=2, hidden=8),
        name=rng.choice(["rolling_means", "moving_average", "smooth"]),
        rules={"window": window, "digits": digits},
        bug=bug,
    )


def page_of(items: list[int], number: int, *, size: int) -> tuple[list[int], int]:
    pages = max(1, (len(items) + size - 1) // size)
    number = min(max(1, number), pages)
    start = (number - 1) * size
    return items[start : start + size], pages


def _page_of(rng: random.Random) -> FunctionDraft:
    size = rng.randint(2, 7)
    full, more = list(range(size * 2)), list(range(size * 2 + 1))
    bug = rng.choice(
        [
            Bug("(len(items) + size - 1) // size", "len(items) // size + 1", ((full, 1), (full, 3))),
            Bug("(len(items) + size - 1) // size", "len(items) // size", ((more, 3), (more, 1))),
            Bug("start = (number - 1) * size", "start = number * size", ((full, 1), (more, 2))),
            Bug("items[start : start + size]", "items[start : start + size - 1]", ((full, 1), (more, 2))),
            Bug("min(max(1, number), pages)", "max(1, number)", ((full, 3), (more, 9))),
            Bug("max(1, (len(items) + size - 1) // size)", "(len(items) + size - 1) // size", (([], 1), ([], 2))),
        ]
    )

    def draw(r: random.Random) -> tuple[list[int], int]:
        return [r.randint(0, 99) for _ in range(r.randint(1, size * 4))], r.randint(0, 5)

    return FunctionDraft(
        page_of,
        f"Return the items of one page and the number of pages. A page has {size} items, the last one possibly fewer; "
        "pages are counted from 1. A number below 1 means the first page, one beyond the end the last. Without items "
        "there is one page, and it is empty.",
        draw_calls(rng, draw, edges=[([7], 1), ([7], 0), (more, -4), (full, 2)], visible=2, hidden=8),
        name=rng.choice(["page_of", "paginate", "get_page"]),
        rules={"size": size},
        bug=bug,
    )


def price(
    quantity: int, cents: int, member: bool, *, bulk: int, bulk_percent: int, member_percent: int, ship: int
) -> int:
    total = quantity * cents
    percent = 0
    if quantity >= bulk:
        percent += bulk_percent
    if member:
        percent += member_percent
    total -= total * percent // 100
    if 0 < total < 10 * ship:
        total += ship
    return total


def _price(rng: random.Random) -> FunctionDraft:
    bulk, ship = rng.randint(5, 20), rng.randrange(290, 900, 10)
    bulk_percent, member_percent = rng.randint(4, 9), rng.randint(10, 15)
    costly, cheap = ship * 11, ship // bulk
    bug = rng.choice(
        [
            Bug("if quantity >= bulk:", "if quantity > bulk:", ((bulk, costly, False), (bulk, costly, True))),
            Bug("    if member:", "    elif member:", ((bulk, costly, True), (bulk + 2, costly, True))),
            Bug(
                "percent += member_percent",
                "percent = member_percent",
                ((bulk, costly, True), (bulk + 1, costly, True)),
            ),
            Bug("if 0 < total < 10 * ship:", "if total < 10 * ship:", ((0, cheap, False), (0, costly, True))),
            Bug("total -= total * percent", "total -= cents * percent", ((2, costly, True), (bulk, costly, False))),
            Bug("        total += ship\n", "        total -= ship\n", ((1, cheap + 1, False), (2, cheap + 5, True))),
        ]
    )

    def draw(r: random.Random) -> tuple[int, int, bool]:
        return r.randint(1, bulk * 2), r.randint(1, ship * 3), r.random() < 0.5

    edges = [(bulk - 1, costly, True), (1, 10 * ship, False), (1, 10 * ship - 1, False)]
    return FunctionDraft(
        price,
        f"""
        The price of an order in cents: quantity times the price of one piece. {bulk} pieces or more give {bulk_percent}
        percent off, members get {member_percent} percent off, and both add up; the discount is rounded down to whole
        cents. If what is left is less than {10 * ship} but not 0, shipping of {ship} is added.
        """,
        draw_calls(rng, draw, edges=edges, visible=2, hidden=8),
        name=rng.choice(["price", "order_total", "invoice_total"]),
        rules={"bulk": bulk, "bulk_percent": bulk_percent, "member_percent": member_percent, "ship": ship},
        bug=bug,
    )


def tally(lines: list[str], *, mark: str, skip: str) -> dict[str, int]:
    totals: dict[str, int] = {}
    for line in lines:
        line = line.strip()
        if not line or line.startswith(skip):
            continue
        name, found, amount = line.rpartition(mark)
        if not found:
            name, amount = line, "1"
        name = name.strip()
        totals[name] = totals.get(name, 0) + int(amount)
    return totals


def _tally(rng: random.Random) -> FunctionDraft:
    mark, skip = rng.choice("=:,"), rng.choice(["#", "--", "//"])
    names = rng.sample(["tea", "rye", "oat milk", "salt", "figs", "corn"], 4)
    a, b = names[:2]
    twice, bare = [f"{a}{mark}2", f"{b}{mark}5", f"{a}{mark}4"], [a, f"{b}{mark}1", a]
    bug = rng.choice(
        [
            Bug("totals.get(name, 0) + int(amount)", "int(amount)", ((twice,), (twice[::-1],))),
            Bug("totals.get(name, 0)", "totals.get(name, 1)", ((twice,), ([f"{a}{mark}7"],))),
            Bug(
                "            continue\n",
                "            break\n",
                (([skip, *twice],), ([f"{a}{mark}1", "", f"{b}{mark}2"],)),
            ),
            Bug("line.rpartition(mark)", "line.partition(mark)", (([f"{a}{mark}1{mark}3"],), ([f"{b}{mark}{mark}8"],))),
            Bug('name, amount = line, "1"', 'name, amount = line, "0"', ((bare,), ([b],))),
            Bug("        name = name.strip()\n", "", (([f"{a} {mark} 3", a],), ([f"  {b}  {mark}1"],))),
        ]
    )

    def draw(r: random.Random) -> tuple[list[str]]:
        lines = []
        for _ in range(r.randint(1, 6)):
            name = r.choice(names)
            lines.append(r.choice([name, "", f"{skip} {name}", *[f" {name} {mark} {r.randint(-3, 9)}"] * 4]))
        return (lines,)

    return FunctionDraft(
        tally,
        f"""
        Add up lines of the form `name{mark}amount`, amounts being whole numbers, into a dict from name to total. The
        amount stands after the last `{mark}`; a line without `{mark}` counts 1. White space around names and amounts
        doesn't count. Blank lines and lines that begin with `{skip}` are skipped.
        """,
        draw_calls(rng, draw, edges=[([],), ([skip],), ([f"{a}{mark}-5"],)], visible=2, hidden=8),
        name=rng.choice(["tally", "total_by_name", "count_stock"]),
        rules={"mark": mark, "skip": skip},
        bug=bug,
    )


def top_scores(rows: list[tuple[str, int]], *, keep: int, least: int) -> list[str]:
    best: dict[str, int] = {}
    for name, score in rows:
        if name not in best or score > best[name]:
            best[name] = score
    ranked = sorted(best.items(), key=lambda row: (-row[1], row[0]))
    return [f"{place}. {name} {score}" for place, (name, score) in enumerate(ranked[:keep], 1) if score >= least]


def _top_scores(rng: random.Random) -> FunctionDraft:
    keep, least = rng.randint(2, 4), rng.randint(10, 40)
    names = rng.sample(["ann", "bo", "cy", "dee", "eli", "flo", "gil"], keep + 2)
    a, b = sorted(names[:2])
    lower = [(a, least + 5), (b, least), (a, least + 1)]
    tie = [(b, least + 3), (a, least + 3)]
    many = [(name, least + 10 * i) for i, name in enumerate(names)]
    bug = rng.choice(
        [
            Bug("if name not in best or score > best[name]:", "if True:", ((lower,), ([(b, least + 9), (b, 0)],))),
            Bug("score > best[name]", "score < best[name]", ((lower,), ([(b, 0), (b, least + 9)],))),
            Bug("(-row[1], row[0])", "(row[1], row[0])", ((many,), (lower,))),
            Bug("(-row[1], row[0])", "-row[1]", ((tie,), ([(b, least), (a, least)],))),
            Bug("ranked[:keep], 1)", "ranked[:keep])", ((many,), ([(b, least)],))),
            Bug("score >= least", "score > least", ((lower,), ([(a, least)],))),
            Bug("ranked[:keep]", "ranked[: keep - 1]", ((many,), (many[::-1],))),
        ]
    )

    def draw(r: random.Random) -> tuple[list[tuple[str, int]]]:
        return ([(r.choice(names), least + r.randint(-8, 15)) for _ in range(r.randint(2, 8))],)

    return FunctionDraft(
        top_scores,
        f"""
        `rows` are (name, score) of a game. Each player counts with the best score. Rank the players by score, the
        highest first, equal ones in alphabetical order; of the first {keep}, list those with a score of at least
        {least} as texts `place. name score`, places counted from 1.
        """,
        draw_calls(rng, draw, edges=[([],), ([(a, least - 1)],)], visible=2, hidden=8),
        name=rng.choice(["top_scores", "leaderboard", "high_scores"]),
        rules={"keep": keep, "least": least},
        bug=bug,
    )


FAMILIES: tuple[Family, ...] = (
    generator(KIND, "binary-search", _binary_search),
    generator(KIND, "rolling-means", _rolling_means),
    generator(KIND, "pages", _page_of),
    generator(KIND, "order-price", _price),
    generator(KIND, "tally", _tally),
    generator(KIND, "top-scores", _top_scores),
)
