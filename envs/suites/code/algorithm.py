"""Small algorithms: intervals, caches, graphs, grids, dynamic programming."""

from __future__ import annotations

import heapq
import random

from palaestra.envs.suites.code.authoring import Cases, Family, FunctionDraft, draw_calls, fixed, generator

KIND = "algorithm"


def merge_intervals(spans: list[tuple[int, int]], *, gap: int, shortest: int) -> list[tuple[int, int]]:
    """Merged spans, in order; those that stay too short are dropped."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return [(start, end) for start, end in merged if end - start >= shortest]


def _merge_intervals(rng: random.Random) -> FunctionDraft:
    gap, shortest = rng.randint(0, 5), rng.randint(1, 5)

    def draw(r: random.Random) -> tuple[list[tuple[int, int]]]:
        starts = [r.randint(-10, 40) for _ in range(r.randint(1, 7))]
        return ([(start, start + r.randint(0, 9)) for start in starts],)

    edges: list[tuple[list[tuple[int, int]]]] = [
        ([],),
        ([(0, shortest)],),
        ([(0, shortest - 1)],),
        ([(0, 9), (9 + gap, 20)],),
        ([(0, 9), (10 + gap, 30)],),
        ([(5, 6), (0, 50), (7, 8)],),
    ]
    return FunctionDraft(
        merge_intervals,
        f"""
        Merge time spans (start, end), start <= end, given in any order. Two spans are merged when they overlap, touch,
        or when at most {gap} lies between the end of one and the start of the other; merged ones are merged further.
        Then drop spans with end - start below {shortest}. Return the spans in order.
        """,
        draw_calls(rng, draw, edges=edges, hidden=12),
        name=rng.choice(["merge_intervals", "merge_spans", "busy_periods"]),
        rules={"gap": gap, "shortest": shortest},
    )


def run_cache(commands: list[tuple[str, str, int]], *, capacity: int, get: str, put: str, miss: int) -> list[int]:
    """What the reads of a least-recently-used cache return."""
    held: dict[str, int] = {}
    answers = []
    for action, key, value in commands:
        if action == get:
            answers.append(held.get(key, miss))
            if key in held:
                held[key] = held.pop(key)
        elif action == put:
            held.pop(key, None)
            held[key] = value
            if len(held) > capacity:
                del held[next(iter(held))]
    return answers


def _run_cache(rng: random.Random) -> FunctionDraft:
    capacity, miss = rng.randint(2, 4), rng.choice([-1, 0, -99])
    get, put = rng.choice([("get", "put"), ("read", "write"), ("fetch", "store")])
    keys = list("abcdef"[: capacity + 2])

    def draw(r: random.Random) -> tuple[list[tuple[str, str, int]]]:
        commands = []
        for _ in range(r.randint(capacity + 4, capacity * 5)):
            key = r.choice(keys)
            commands.append((put, key, r.randint(1, 99)) if r.random() < 0.55 else (get, key, 0))
        return (commands,)

    fill = [(put, key, index + 1) for index, key in enumerate(keys[:capacity])]
    edges: list[tuple[list[tuple[str, str, int]]]] = [
        ([],),
        ([(get, "a", 0)],),
        ([*fill, (get, "a", 0), (put, "z", 50), (get, "a", 0), (get, "b", 0)],),
        ([*fill, (put, "a", 60), (put, "z", 50), (get, "a", 0), (get, "b", 0)],),
    ]
    return FunctionDraft(
        run_cache,
        f"""
        Simulate a cache that holds at most {capacity} keys. `({put!r}, key, value)` stores a value; when that makes too
        many keys, the least recently used one is dropped. `({get!r}, key, 0)` reads one. Storing and a successful read
        both count as use. Return the results of the reads in order, {miss} for a key that is not there.
        """,
        draw_calls(rng, draw, edges=edges),
        name=rng.choice(["run_cache", "simulate_cache", "cache_reads"]),
        rules={"capacity": capacity, "get": get, "put": put, "miss": miss},
    )


def build_order(needs: dict[str, list[str]], *, reverse_ties: bool) -> list[str] | None:
    """The one topological order in which ties are broken by name; None for a cycle."""
    waiting = {name: set(before) for name, before in needs.items()}
    for before in needs.values():
        for name in before:
            waiting.setdefault(name, set())
    order: list[str] = []
    while waiting:
        ready = [name for name, before in waiting.items() if not before]
        if not ready:
            return None
        name = max(ready) if reverse_ties else min(ready)
        order.append(name)
        del waiting[name]
        for unmet in waiting.values():
            unmet.discard(name)
    return order


def _build_order(rng: random.Random) -> FunctionDraft:
    reverse_ties = rng.random() < 0.5
    names = rng.choice(
        [["app", "core", "db", "net", "ui", "utils"], ["base", "docs", "lint", "pack", "ship", "test"], list("pqrstu")]
    )

    def draw(r: random.Random) -> tuple[dict[str, list[str]]]:
        ranked = r.sample(names, len(names))
        needs = {name: sorted(r.sample(ranked[:i], r.randint(0, min(2, i)))) for i, name in enumerate(ranked)}
        if r.random() < 0.15:
            needs[ranked[0]] = [ranked[-1]]
        return ({name: needs[name] for name in r.sample(names, r.randint(3, len(names)))},)

    a, b, c = names[:3]
    edges: list[tuple[dict[str, list[str]]]] = [
        ({},),
        ({a: [a]},),
        ({a: [b]},),
        ({a: [b], b: [c], c: [a]},),
        ({a: [], b: [], c: []},),
        ({c: [a, a], b: []},),
    ]
    first = "last" if reverse_ties else "first"
    return FunctionDraft(
        build_order,
        f"""
        `needs` maps a package to the packages that must be built before it; packages that occur only in such a list
        need nothing. Return an order in which all packages can be built. Whenever several could be next, take the one
        whose name is {first} in alphabetical order. Return None when there is no such order.
        """,
        draw_calls(rng, draw, edges=edges, hidden=12),
        name=rng.choice(["build_order", "install_order", "schedule"]),
        rules={"reverse_ties": reverse_ties},
    )


def cheapest_path(rows: list[str], *, start: str, goal: str, wall: str, swamp: str, swamp_cost: int) -> int | None:
    """Cost of the cheapest way through a map, or None."""
    where = {(y, x): cell for y, row in enumerate(rows) for x, cell in enumerate(row) if cell != wall}
    queue = [(0, position) for position, cell in where.items() if cell == start]
    done = set()
    while queue:
        cost, (y, x) = heapq.heappop(queue)
        if (y, x) in done:
            continue
        done.add((y, x))
        if where[y, x] == goal:
            return cost
        for step in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
            if step in where:
                heapq.heappush(queue, (cost + (swamp_cost if where[step] == swamp else 1), step))
    return None


def _cheapest_path(rng: random.Random) -> FunctionDraft:
    start, goal = rng.choice([("S", "G"), ("A", "B"), ("@", "X")])
    wall, swamp, swamp_cost = rng.choice("#%"), rng.choice("~w:"), rng.randint(3, 7)

    def draw(r: random.Random) -> tuple[list[str]]:
        height, width = r.randint(3, 6), r.randint(3, 7)
        cells = [[r.choices([".", wall, swamp], [60, 24, 16])[0] for _ in range(width)] for _ in range(height)]
        cells[0][r.randrange(width)] = start
        cells[-1][r.randrange(width)] = goal
        return (["".join(row) for row in cells],)

    around = [f"{start}{swamp}{goal}", "...", "..."]
    edges = [([start + goal],), ([f"{start}{wall}{goal}"],), ([f"{start}{swamp}{goal}"],), (around,)]
    return FunctionDraft(
        cheapest_path,
        f"""
        The cheapest way through a map from `{start}` to `{goal}`, one step up, down, left or right at a time. `{wall}`
        is a wall. Entering `{swamp}` costs {swamp_cost}, entering any other cell costs 1. Return the cost, or None when
        the goal cannot be reached.
        """,
        draw_calls(rng, draw, edges=edges),
        name=rng.choice(["cheapest_path", "path_cost", "shortest_way"]),
        rules={"start": start, "goal": goal, "wall": wall, "swamp": swamp, "swamp_cost": swamp_cost},
        uses=(heapq,),
    )


def fewest_coins(amount: int, *, coins: list[int], most: int) -> list[int] | None:
    """The fewest coins, largest first; of several such ways the one with the larger coins. None if not possible."""
    best: list[list[int] | None] = [[]]
    for total in range(1, amount + 1):
        options = []
        for coin in coins:
            if coin <= total:
                rest = best[total - coin]
                if rest is not None:
                    options.append(sorted([*rest, coin], reverse=True))
        best.append(min(options, key=lambda way: (len(way), [-coin for coin in way])) if options else None)
    way = best[amount]
    return way if way is not None and len(way) <= most else None


def _fewest_coins(rng: random.Random) -> FunctionDraft:
    coins = sorted(rng.sample(range(2, 30), 4), reverse=True)
    most = rng.randint(4, 7)

    def draw(r: random.Random) -> tuple[int]:
        return (r.choice([r.randint(1, coins[0] * most), sum(r.choices(coins, k=r.randint(2, most)))]),)

    edges = [(0,), (1,), (coins[0],), (coins[-1] * 2,), (coins[0] * most,), (coins[0] * most + coins[-1],)]
    return FunctionDraft(
        fewest_coins,
        f"""
        Pay an amount exactly with as few coins as possible; there are coins of {", ".join(map(str, coins))}, any number
        of each. Return the coins in descending order; when several ways need equally few coins, the one that is largest
        when the lists are compared. Return None when it cannot be paid, or only with more than {most} coins.
        """,
        draw_calls(rng, draw, edges=edges, hidden=12),
        name=rng.choice(["fewest_coins", "pay", "change_for"]),
        rules={"coins": coins, "most": most},
    )


def edit_distance(left: str, right: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(right) + 1))
    for i, x in enumerate(left, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(right, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def first_unbalanced(text: str) -> int | None:
    """Where the brackets go wrong, or None."""
    partner = {")": "(", "]": "[", "}": "{"}
    opened: list[int] = []
    for index, character in enumerate(text):
        if character in "([{":
            opened.append(index)
        elif character in partner:
            if not opened or text[opened[-1]] != partner[character]:
                return index
            opened.pop()
    return opened[0] if opened else None


def longest_rise(values: list[int]) -> list[int]:
    """The longest strictly increasing subsequence that is smallest when lists are compared."""
    best: list[list[int]] = []  # best[i]: the best one that ends with values[i]
    for index, value in enumerate(values):
        before = [best[j] for j in range(index) if values[j] < value]
        best.append([*min(before, key=lambda rise: (-len(rise), rise), default=[]), value])
    return min(best, key=lambda rise: (-len(rise), rise), default=[])


def rooms_needed(meetings: list[tuple[int, int]]) -> int:
    """The most meetings at one moment; one that ends when another starts leaves its room."""
    events = sorted([(start, 1) for start, _ in meetings] + [(end, -1) for _, end in meetings])
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


FAMILIES: tuple[Family, ...] = (
    generator(KIND, "merge-intervals", _merge_intervals),
    generator(KIND, "lru-cache", _run_cache),
    generator(KIND, "build-order", _build_order),
    generator(KIND, "cheapest-path", _cheapest_path),
    generator(KIND, "coins", _fewest_coins),
    fixed(
        KIND,
        "edit-distance",
        FunctionDraft(
            edit_distance,
            "The least number of insertions, deletions and replacements of single characters that turn one text into "
            "the other.",
            Cases(
                [("kitten", "sitting"), ("abc", "abc"), ("", "ab")],
                [
                    ("", ""),
                    ("a", "b"),
                    ("abc", "cba"),
                    ("flaw", "lawn"),
                    ("intention", "execution"),
                    ("aaaa", "aa"),
                    ("Ab", "ab"),
                    ("x" * 60, "y" * 59),
                ],
            ),
        ),
    ),
    fixed(
        KIND,
        "brackets",
        FunctionDraft(
            first_unbalanced,
            "Check the brackets `()`, `[]` and `{}` in a text. Return the index of the first closing bracket that "
            "doesn't match the bracket opened last; if there is none, the index of the first opening bracket that is "
            "never closed; None when all is balanced. Other characters don't count.",
            Cases(
                [("f(a[0])",), ("(]",), ("a(b",)],
                [("",), ("x",), (")",), ("(",), ("()[]{}",), ("([)]",), ("{[()]}}",), ("((())",), ("[(a)](",)],
            ),
        ),
    ),
    fixed(
        KIND,
        "longest-rise",
        FunctionDraft(
            longest_rise,
            "The longest strictly increasing subsequence of a list (elements in their order, not necessarily next to "
            "each other). Of several longest ones return the smallest when lists are compared.",
            Cases(
                [([3, 1, 2, 5, 4],), ([5, 4, 3],), ([1, 2, 3],)],
                [
                    ([],),
                    ([7],),
                    ([2, 2, 2],),
                    ([10, 9, 2, 5, 3, 7, 101, 18],),
                    ([0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13],),
                    ([-1, -3, -2, 0],),
                    ([4, 5, 1, 2],),
                ],
            ),
        ),
    ),
    fixed(
        KIND,
        "meeting-rooms",
        FunctionDraft(
            rooms_needed,
            "How many rooms are needed for meetings (start, end) with start < end, given in any order. A meeting that "
            "ends at the moment when another starts leaves its room to it.",
            Cases(
                [([(0, 30), (5, 10), (15, 20)],), ([(1, 2), (2, 3)],)],
                [
                    ([],),
                    ([(4, 9)],),
                    ([(1, 5), (1, 5), (1, 5)],),
                    ([(10, 20), (0, 10), (5, 15)],),
                    ([(0, 100), (1, 2), (2, 3), (3, 4)],),
                    ([(1, 3), (2, 4), (3, 5), (4, 6)],),
                    ([(-5, 0), (-1, 1)],),
                ],
            ),
        ),
    ),
)
