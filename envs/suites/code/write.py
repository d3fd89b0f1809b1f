"""Write a function from a description: small business rules and formatting."""

from __future__ import annotations

import random

from palaestra.envs.suites.code.authoring import Cases, Family, FunctionDraft, draw_calls, fixed, generator

KIND = "write"


def shipping_fee(grams: int, express: bool, *, tiers: list[tuple[int, int]], above: int, percent: int) -> int | None:
    """Fee in cents, or None for a weight that cannot be shipped."""
    if grams <= 0:
        return None
    fee = next((cents for limit, cents in tiers if grams <= limit), above)
    return fee + fee * percent // 100 if express else fee


def _shipping_fee(rng: random.Random) -> FunctionDraft:
    limits = sorted(rng.sample(range(100, 5000, 50), 3))
    fees = sorted(rng.sample(range(150, 2500, 5), 4))
    tiers, above, percent = list(zip(limits, fees[:3], strict=True)), fees[3], rng.choice([15, 20, 25, 40, 50])
    table = "\n".join(f"- up to and including {limit} g: {cents} cents" for limit, cents in tiers)
    edges = [
        (0, False),
        (-5, True),
        *((limit, False) for limit in limits),
        (limits[0] + 1, False),
        (limits[2] + 1, True),
    ]
    return FunctionDraft(
        shipping_fee,
        f"The fee of a parcel in cents, by its weight:\n\n{table}\n- heavier: {above} cents\n\n"
        f"Express adds {percent} percent of the fee, rounded down to whole cents. "
        "A weight of 0 or less cannot be shipped: return None.",
        draw_calls(rng, lambda r: (r.randint(1, limits[2] * 2), r.random() < 0.5), edges=edges, hidden=11),
        name=rng.choice(["shipping_fee", "parcel_price", "postage", "delivery_cost"]),
        rules={"tiers": tiers, "above": above, "percent": percent},
    )


def broken_rules(password: str, *, shortest: int, longest: int, symbols: str, longest_run: int) -> list[str]:
    """The names of the broken rules, in the fixed order."""
    run = best = 0
    previous = ""
    for character in password:
        run = run + 1 if character == previous else 1
        best, previous = max(best, run), character
    rules = [
        ("length", shortest <= len(password) <= longest),
        ("digit", any(character.isdigit() for character in password)),
        ("upper", any(character.isupper() for character in password)),
        ("symbol", any(character in symbols for character in password)),
        ("run", best <= longest_run),
    ]
    return [name for name, kept in rules if not kept]


def _broken_rules(rng: random.Random) -> FunctionDraft:
    shortest, symbols, longest_run = rng.randint(4, 9), "".join(rng.sample("!#$%&*+-=?@_", 4)), rng.randint(2, 3)
    longest = shortest + rng.randint(6, 12)
    alphabet = f"aabbcXYZ0129{symbols}."

    def draw(r: random.Random) -> tuple[str]:
        return ("".join(r.choice(alphabet) for _ in range(r.randint(2, longest + 2))),)

    perfect = ("Ab1" + symbols[0]) * 6
    edges = [("",), (perfect[:shortest],), (perfect[:longest],), (perfect[: longest + 1],)]
    edges.append(("Q7" + symbols[1] + "z" * (longest_run + 1) + "abcdef"[: max(0, shortest - 4 - longest_run)],))
    return FunctionDraft(
        broken_rules,
        f"""
        The names of the rules that a password breaks, in this order:

        - `length`: it has {shortest} to {longest} characters
        - `digit`: it contains a digit
        - `upper`: it contains an upper-case letter
        - `symbol`: it contains one of `{symbols}`
        - `run`: no character occurs more than {longest_run} times in a row

        An empty list means that the password is fine.
        """,
        draw_calls(rng, draw, edges=edges),
        name=rng.choice(["broken_rules", "password_problems", "policy_violations"]),
        rules={"shortest": shortest, "longest": longest, "symbols": symbols, "longest_run": longest_run},
    )


def run_machine(events: list[str], *, start: str, moves: dict[str, dict[str, str]]) -> str | None:
    """The state after all events, or None when an event is not possible in the state of the moment."""
    state = start
    for event in events:
        if event not in moves[state]:
            return None
        state = moves[state][event]
    return state


_MACHINES = (
    (["draft", "review", "approved", "published", "archived"], ["submit", "reject", "approve", "publish", "archive"]),
    (["new", "paid", "packed", "shipped", "returned"], ["pay", "pack", "ship", "return", "refund"]),
    (["idle", "starting", "running", "stopping", "failed"], ["start", "ready", "stop", "crash", "reset"]),
)


def _run_machine(rng: random.Random) -> FunctionDraft:
    states, events = rng.choice(_MACHINES)
    moves: dict[str, dict[str, str]] = {state: {} for state in states}
    for state in states:
        for event in sorted(rng.sample(events, 3)):
            moves[state][event] = rng.choice([other for other in states if other != state])
    start = states[0]

    def draw(r: random.Random) -> tuple[list[str]]:
        state, walked = start, []
        for _ in range(r.randint(1, 9)):
            event = r.choice(sorted(moves[state])) if r.random() < 0.94 else r.choice(events)
            walked.append(event)
            state = moves[state].get(event, state)
        return (walked,)

    table = "\n".join(f"- {s} -> {', '.join(f'{e}: {t}' for e, t in moves[s].items())}" for s in states)
    impossible = next(event for event in events if event not in moves[start])
    return FunctionDraft(
        run_machine,
        f"An order of work moves between states. It starts as {start!r}. In each state these events are possible, and "
        f"lead to:\n\n{table}\n\nReturn the state after all events, or None as soon as an event is not possible.",
        draw_calls(rng, draw, edges=[([],), ([impossible],)]),
        name=rng.choice(["final_state", "run_machine", "state_after"]),
        rules={"start": start, "moves": moves},
    )


def slug(title: str, *, separator: str, longest: int, dropped: list[str]) -> str:
    """A title as part of an address."""
    cleaned = "".join(character if character.isascii() and character.isalnum() else " " for character in title.lower())
    words = [word for word in cleaned.split() if word not in dropped]
    kept = ""
    for word in words:
        longer = f"{kept}{separator}{word}" if kept else word
        if len(longer) > longest:
            break
        kept = longer
    return kept


def _slug(rng: random.Random) -> FunctionDraft:
    separator, longest = rng.choice("-_."), rng.randint(14, 26)
    dropped = sorted(rng.sample(["a", "an", "the", "of", "and", "in", "to"], 4))
    text = "The quick Release of Palaestra 2 and an Update! to-do in C++ it's Über notes, a (small) list"
    words = text.split()

    def draw(r: random.Random) -> tuple[str]:
        return (r.choice([" ", "  ", " / "]).join(r.choice(words) for _ in range(r.randint(2, 7))),)

    edges = [("",), ("!!!",), (f"{dropped[0]} {dropped[1]}",), ("x" * (longest + 1),), ("x" * longest,)]
    return FunctionDraft(
        slug,
        f"""
        Turn a title into a slug: lower-case it; treat every character that is not an ASCII letter or digit as a space;
        drop the words {", ".join(dropped)}; join the rest with `{separator}`. The slug has at most {longest}
        characters: stop before the first word that would make it longer. Nothing left gives the empty string.
        """,
        draw_calls(rng, draw, edges=edges, hidden=11),
        name=rng.choice(["slug", "slugify", "make_slug"]),
        rules={"separator": separator, "longest": longest, "dropped": dropped},
    )


def admitted(times: list[int], *, most: int, window_s: int) -> list[bool]:
    """Sliding-window rate limiting; a refused request doesn't count."""
    accepted: list[int] = []
    answers = []
    for time in times:
        recent = [earlier for earlier in accepted if earlier > time - window_s]
        answers.append(len(recent) < most)
        if answers[-1]:
            accepted.append(time)
    return answers


def _admitted(rng: random.Random) -> FunctionDraft:
    most, window_s = rng.randint(2, 4), rng.randint(5, 30)

    def draw(r: random.Random) -> tuple[list[int]]:
        return (sorted(r.randint(0, window_s * 3) for _ in range(r.randint(most, most * 5))),)

    edges = [([],), ([0] * (most + 2),), ([0] * most + [window_s - 1, window_s],)]
    return FunctionDraft(
        admitted,
        f"""
        A rate limiter. `times` are the seconds at which requests arrive, in order. A request at time t is admitted if
        fewer than {most} requests were admitted in the {window_s} seconds before it: at times greater than
        t - {window_s} and up to t, earlier requests of the same second included. Refused requests don't count.
        Return for each request whether it is admitted.
        """,
        draw_calls(rng, draw, edges=edges),
        name=rng.choice(["admitted", "rate_limit", "throttle"]),
        rules={"most": most, "window_s": window_s},
    )


def to_roman(number: int) -> str:
    """1..3999 as a Roman numeral."""
    values = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC")]
    values += [(50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
    text = ""
    for value, letters in values:
        count, number = divmod(number, value)
        text += letters * count
    return text


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, ..."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def human_size(size: int) -> str:
    """Bytes for people."""
    if size < 1024:
        return f"{size} B"
    tenths = size * 10 // 1024
    for unit in ("KiB", "MiB", "GiB"):
        if tenths < 10240:
            return f"{tenths // 10}.{tenths % 10} {unit}"
        tenths //= 1024
    return f"{tenths // 10}.{tenths % 10} TiB"


def mask_secrets(line: str) -> str:
    """Hide the values of secret keys in ``key=value`` words."""
    words = []
    for word in line.split(" "):
        key, equals, value = word.partition("=")
        secret = any(part in key.lower() for part in ("password", "token", "secret"))
        words.append(f"{key}=***" if secret and equals and value else word)
    return " ".join(words)


FAMILIES: tuple[Family, ...] = (
    generator(KIND, "shipping-fee", _shipping_fee),
    generator(KIND, "password-rules", _broken_rules),
    generator(KIND, "state-machine", _run_machine),
    generator(KIND, "slug", _slug),
    generator(KIND, "rate-limit", _admitted),
    fixed(
        KIND,
        "roman",
        FunctionDraft(
            to_roman,
            "Write a number from 1 to 3999 as a Roman numeral in capital letters, in the usual subtractive form.",
            Cases(
                [(14,), (1990,), (3,)],
                [(1,), (4,), (9,), (40,), (90,), (400,), (900,), (444,), (2421,), (3999,), (3888,)],
            ),
        ),
    ),
    fixed(
        KIND,
        "ordinal",
        FunctionDraft(
            ordinal,
            "The English ordinal of a number >= 0 in digits. Numbers that end in 11, 12 or 13 take `th`.",
            Cases([(1,), (22,), (11,)], [(0,), (2,), (3,), (4,), (12,), (13,), (21,), (101,), (111,), (1013,), (103,)]),
        ),
    ),
    fixed(
        KIND,
        "human-size",
        FunctionDraft(
            human_size,
            "A size in bytes for people. Below 1024 it is `N B`. Otherwise use the first of KiB, MiB, GiB, TiB (steps "
            "of 1024) in which the number is below 1024, TiB for anything larger, with exactly one decimal, cut off "
            "and not rounded.",
            Cases(
                [(532,), (1536,), (5_000_000,)],
                [(0,), (1023,), (1024,), (2047,), (1024**2 - 1,), (1024**2,), (1024**3 * 7,), (1024**4 * 3000,)],
            ),
        ),
    ),
    fixed(
        KIND,
        "mask-secrets",
        FunctionDraft(
            mask_secrets,
            "A log line consists of words separated by single spaces. In each word of the form `key=value` whose key "
            "contains `password`, `token` or `secret` (upper or lower case), replace a value that is not empty by "
            "`***`. The value is everything after the first `=`. Leave all else as it is.",
            Cases(
                [("login user=ann password=hunter2 ok",), ("GET /x API_TOKEN=a=b",), ("no secrets here",)],
                [
                    ("",),
                    ("password",),
                    ("password=",),
                    ("Client-Secret=1 secretary=2",),
                    ("a=password b=token",),
                    ("  token=x  ",),
                    ("tokens=1,2 id=7 Password=p",),
                ],
            ),
        ),
    ),
)
