"""A shell session goes on where its last command ended, and every command in it is what plain bash would make of it."""

from __future__ import annotations

import io
import zipfile

import pytest

from palaestra.envs.errors import UsageError
from palaestra.envs.sandboxes import Argv, BackendName, ExecResult, Sandbox, SandboxSpec, Shell, bubblewrap
from palaestra.envs.sandboxes.backends import open_pool
from palaestra.envs.sandboxes.bundle import supervisor_zip
from palaestra.envs.sandboxes.podman import backend as podman
from palaestra.envs.sandboxes.supervisor.session import MAX_SESSIONS, MAX_STATE_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def play(sandbox: Sandbox, *commands: str, session: str = "main") -> ExecResult:
    """Run the commands one after the other; the last one's result."""
    for command in commands:
        result = await sandbox.run(Shell(command, session=session), timeout_s=20)
    return result


# What an earlier command did, a later command, and what that one prints.
_KEPT = {
    "working directory": (["mkdir -p 'a b/c'; cd 'a b/c'"], "pwd; cd -", "/workspace/a b/c\n/workspace\n"),
    "a folder with a newline": (["mkdir $'x\\ny'; cd $'x\\ny'"], "pwd", "/workspace/x\ny\n"),
    "a symbolic link": (["mkdir real; ln -s real link; cd link"], "pwd; pwd -P", "/workspace/link\n/workspace/real\n"),
    "variables": (["X=1; export Y='two words'"], "echo $X; sh -c 'echo $X$Y'", "1\ntwo words\n"),
    "any bytes": (["X=$'a\\nb\\'\"`$(c)\\\\ \\xff\\x01é'"], "printf %s \"$X\" | od -An -tx1 | tr -d ' \\n'", None),
    "arrays": (
        ["a=(1 'two three' [9]=$'n\\nl'); declare -A m=([k v]=w)"],
        'echo "${!a[@]}" "${a[9]}" "${m[k v]}"',
        "0 1 9 n\nl w\n",
    ),
    "a declared map": (["declare -A m"], "m[k]=v; echo ${!m[@]}", "k\n"),
    "attributes": (["declare -i n=4; declare -u u=abc; declare -n r=n"], "n+=1; r+=1; echo $n $u", "6 ABC\n"),
    "readonly": (["readonly R=5"], "(R=6) 2>&1; echo $R", "bash: line 1: R: readonly variable\n5\n"),
    "functions": (["f() { cat <<X\n}\ng () \n{ \nX\n}"], "f", "}\ng () \n{ \n"),
    "functions with odd names": (
        ["my-f() { echo 1; }; function a=b { echo 2; }; function if { echo 3; }; function é.x { echo 4; }"],
        "my-f; \\a=b; \\if; é.x",
        "1\n2\n3\n4\n",
    ),
    "exported and readonly functions": (
        ["f() { echo f; }; export -f f; readonly -f f"],
        "bash -c f; declare -F f; declare -fp f | tail -1",
        "f\nf\ndeclare -frx f\n",
    ),
    "functions over extended patterns": (
        ["shopt -s extglob\nf() { case $1 in @(x|y)) echo hit;; esac; }\nshopt -u extglob"],
        "declare -f f | grep -c @; shopt -q extglob || echo off",
        "1\noff\n",
    ),
    "aliases": (["shopt -s expand_aliases; alias ll='echo aliased'; alias -- -x=y"], "ll; alias -- -x", None),
    "options": (["set -fu; shopt -s nullglob"], "echo $-; shopt -q nullglob && echo on", "fhuBc\non\n"),
    "umask": (["umask 027"], "umask", "0027\n"),
    "unset": (["X=1", "unset X LANG PATH OLDPWD"], "echo ${X-none} ${LANG-none} ${PATH-none} ${OLDPWD-none}", None),
    "unexport": (["export X=1", "export -n X"], "echo $X; /usr/bin/env | grep -c ^X=", "1\n0\n"),
    "after exit": (["cd /tmp; X=1; exit 3"], "pwd; echo $X", "/tmp\n1\n"),
    "after an error that ends the shell": (["set -eu; X=1; cd /tmp; false; X=2"], "pwd; echo $X", "/tmp\n1\n"),
    "after an unset variable under -u": (["X=1; set -u; echo $none"], "echo $X", "1\n"),
    "after a trap on exit": (["trap 'echo bye; exit 5' EXIT; X=1; cd /tmp"], "pwd; echo $X; trap", "/tmp\n1\n"),
    "a syntax error changes nothing": (["X=1", "X=2 if then"], "echo $X", "1\n"),
    "a replaced shell changes nothing": (["X=1", "X=2; exec true"], "echo $X", "1\n"),
    "kill -9 changes nothing": (["X=1", "X=2; kill -9 $$"], "echo $X", "1\n"),
    "arguments, $0, $# and line numbers are fresh": (
        ["cd /tmp", "set -- a b"],
        "echo $0 $# $LINENO ${BASH_SOURCE-} ${BASH_ENV-}",
        "bash 0 1\n",
    ),
}
_SHOWN = {
    "any bytes": "610a6227226024286329 5c20ff01c3a9".replace(" ", ""),
    "aliases": "aliased\nalias -- -x='y'\n",
    "unset": "none none none none\n",
}


@pytest.mark.parametrize("what", _KEPT)
async def test_a_session_keeps(sandbox: Sandbox, what: str) -> None:
    before, after, shown = _KEPT[what]
    result = await play(sandbox, *before, after)
    assert (result.stdout_text, result.stderr_text) == (shown or _SHOWN[what], "")


_SAME = [
    "echo out; echo err >&2; exit 3",
    "cat; echo $?",
    "if then",
    "echo 'unclosed",
    "echo 1\n\nnonsense\necho $LINENO",
    "cat <<X\nhello $((1 + 1))\nX",
    "cat <<X\nnever closed",
    "echo ${x?is missing}; echo no",
    "set -x; echo hi; f() { return 4; }; f",
    "trap 'echo bye $?' EXIT; trap; (exit 4)",
    "trap 'echo one' EXIT; trap 'echo two' EXIT; trap - EXIT; trap -p",
    "trap 'echo err' ERR; false; (trap 'echo inner' EXIT; exit 2); echo $?",
    "kill -TERM $$; sleep 9",
    "exec ls -d /",
    "exec 2>&1 1>/dev/null; echo gone; echo seen >&2",
    "-c",
    "",
    "echo $0 $# $- $SHLVL; ls /proc/self/fd | wc -l",
    "env | grep -v '^_=' | sort",
    "no-such-program",
    "/etc/passwd",
    "exit 300",
]


@pytest.mark.parametrize("command", _SAME)
@pytest.mark.parametrize("when", ["first", "later"])
async def test_streams_and_exit_code_are_those_of_plain_bash(sandbox: Sandbox, command: str, when: str) -> None:
    plain = await sandbox.run(Argv(("bash", "-c", "--", command)), stdin=b"typed\n", timeout_s=20)
    if when == "later":
        await play(sandbox, "X=1")
    result = await sandbox.run(Shell(command, session="main"), stdin=b"typed\n", timeout_s=20)
    assert (result.stdout, result.stderr) == (plain.stdout, plain.stderr)
    assert (result.exit_code, result.signal) == (plain.exit_code, plain.signal)


async def test_a_folder_that_is_gone_is_said_and_the_session_goes_on_in_the_workspace(sandbox: Sandbox) -> None:
    result = await play(sandbox, "mkdir gone; cd gone; rmdir ../gone", "pwd; echo $OLDPWD")
    assert result.stdout == b"/workspace\n/workspace\n"
    assert result.stderr == b"bash: /workspace/gone: the working directory of the session is gone; " + (
        b"going on in /workspace\n"
    )
    assert (await play(sandbox, "pwd")).stderr == b""


async def test_a_session_survives_a_timeout_as_it_was_before(sandbox: Sandbox) -> None:
    await play(sandbox, "cd /tmp; X=1")
    timed_out = await sandbox.run(Shell("X=2; cd /; while :; do :; done", session="main"), timeout_s=0.7)
    assert timed_out.timed_out
    assert (await play(sandbox, "pwd; echo $X")).stdout == b"/tmp\n1\n"


async def test_a_state_that_is_too_large_is_said_and_leaves_the_session_as_it_was(sandbox: Sandbox) -> None:
    result = await play(sandbox, "X=1; cd /tmp", f"cd /; printf -v X '%{MAX_STATE_BYTES}s'")
    assert result.ok
    assert "the session stays as it was: its state has" in result.stderr_text
    assert (await play(sandbox, "pwd; echo $X")).stdout == b"/tmp\n1\n"


async def test_sessions_are_apart_from_each_other_and_end_with_their_cell(sandbox: Sandbox) -> None:
    await play(sandbox, "X=1; cd /tmp", session="one")
    assert (await play(sandbox, "pwd; echo [$X]", session="two")).stdout == b"/workspace\n[]\n"
    assert (await sandbox.run(Shell("pwd; echo [$X]"), timeout_s=5)).stdout == b"/workspace\n[]\n"
    await sandbox.renew()
    assert (await play(sandbox, "pwd; echo [$X]", session="one")).stdout == b"/workspace\n[]\n"


async def test_given_variables_reach_the_command_above_those_of_the_session(sandbox: Sandbox) -> None:
    await play(sandbox, "export X=old; readonly -a Y=(1)")
    env = {"X": "new\n'\"", "é.dotted": "1", "POSIXLY_CORRECT": "1"}
    code = f'python3 -c "import os; print([os.environ.get(name) for name in {list(env)}])"'
    result = await sandbox.run(Shell(code, session="main"), env=env, timeout_s=9)
    assert result.stdout_text == f"{list(env.values())}\n"


async def test_the_number_and_the_names_of_sessions_are_limited(sandbox: Sandbox) -> None:
    for name in ("", "x" * 65):
        with pytest.raises(UsageError, match="1 to 64 characters"):
            await play(sandbox, ":", session=name)
    for number in range(MAX_SESSIONS):
        await play(sandbox, "X=1", session=str(number))
    with pytest.raises(UsageError, match=f"at most {MAX_SESSIONS} sessions"):
        await play(sandbox, ":", session="one more")
    assert (await play(sandbox, "echo $X", session="0")).stdout == b"1\n"
    await sandbox.renew()
    assert (await play(sandbox, "echo [$X]", session="one more")).stdout == b"[]\n"


_TO_ALL = "for i in $(seq 5 255); do { %s >&$i; } 2>/dev/null; done"
_FORGED = {
    "nonsense": _TO_ALL % "echo nonsense",
    "too much": _TO_ALL % "head -c 3000000 /dev/zero",
    "other commands": _TO_ALL % "printf ':\\0/\\0000\\0)(\\0exit 7\\0(\\0'" + "; kill -9 $$",
}


@pytest.mark.parametrize("how", _FORGED)
async def test_a_forged_state_harms_nothing_but_its_own_session(sandbox: Sandbox, how: str) -> None:
    await play(sandbox, "X=1", session="other")
    await play(sandbox, _FORGED[how])
    await play(sandbox, "true")
    assert (await play(sandbox, "echo $X", session="other")).stdout == b"1\n"
    assert (await sandbox.run(Argv(("echo", "alive")), timeout_s=5)).stdout == b"alive\n"


async def test_a_session_works_where_programs_may_open_few_files(backend: BackendName) -> None:
    async with await open_pool(SandboxSpec(open_files=16), backend=backend) as pool:
        sandbox = await pool.acquire()
        assert (await play(sandbox, "X=1; cd /tmp", "echo $X; pwd")).stdout == b"1\n/tmp\n"


def without_bash() -> bytes:
    """The supervisor as it is in a cell that has no bash."""
    place = 'self._bash = _find("bash")'
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(supervisor_zip())) as intact, zipfile.ZipFile(buffer, "w") as changed:
        for name in intact.namelist():
            text = intact.read(name).decode()
            assert not name.endswith("/session.py") or place in text
            changed.writestr(name, text.replace(place, "self._bash = None"))
    return buffer.getvalue()


async def test_without_bash_folder_and_exported_variables_are_kept(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bubblewrap, podman):
        monkeypatch.setattr(module, "supervisor_zip", without_bash)
    async with await open_pool(backend=backend) as pool:
        sandbox = await pool.acquire()
        first = await play(sandbox, 'mkdir "it\'s"; cd "it\'s"; export X="a\nb\'"; unset LANG; Y=1; exit 3')
        assert (first.exit_code, first.stdout, first.stderr) == (3, b"", b"")
        second = await play(sandbox, 'pwd; echo "$X[$Y][$LANG]"; rmdir "../it\'s"')
        assert (second.stdout, second.stderr) == (b"/workspace/it's\na\nb'[][]\n", b"")
        third = await play(sandbox, "pwd\nnonsense")
        assert third.stdout == b"/workspace\n"
        assert third.stderr_text.splitlines()[1] == "sh: 2: nonsense: not found"
        assert "working directory of the session is gone" in third.stderr_text.splitlines()[0]
