"""Shell sessions: what one command of a session leaves for the next.

No shell lives on. Each command starts a new one, which first reads the state of its session from a descriptor, and
whose EXIT trap sends the new state back over another; the cell's init keeps it. So a command that is killed leaves its
session as it was, and nothing of this passes through the command's own streams. What is kept is text that only the
agent's own next shell evaluates: forging it gains an agent nothing.

bash keeps working directory, variables, functions, aliases, options and umask. Its start-up file (BASH_ENV) is where
the state is read, so that the command itself is what ``bash -c`` is given, to the line numbers in error messages.
Where there is no bash, ``/bin/sh`` keeps working directory and exported variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

MAX_SESSIONS = 16
"""Names that one cell keeps a state for."""
MAX_STATE_BYTES = 1 << 20
"""Of one session. A command that leaves more leaves its session as it was."""
STATE_FROM_FD, STATE_TO_FD = 5, 6
_START = f"/proc/self/fd/{STATE_FROM_FD}"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# bash marks the descriptor that it puts aside for a redirection (10, the first free one) close-on-exec, and so is what
# is duplicated from one: the commands of the user's shell inherit nothing.
_BASH_OPENING = """\
builtin unset -v BASH_ENV
{{ exec {kept}>&10; }} {to}>&-
exec {given}<&- {to}>&-
"""
# bash gives itself these variables; a session that unset one must not find it again.
_BASH_OWN = "HOSTNAME HOSTTYPE IFS MACHTYPE OLDPWD OPTERR OPTIND OSTYPE PATH PS4 SHELL SHLVL TERM"
_BASH_STATE = """\
{{
builtin unset -v {own}
builtin eval {variables}
builtin set -- "${{OLDPWD+set}}" "${{OLDPWD-}}"
}} >/dev/null 2>&1
builtin cd -- {folder} >/dev/null 2>&1 || {{
builtin cd /workspace
builtin printf 'bash: %s: the working directory of the session is gone; going on in /workspace\\n' {folder} >&2
}}
{{
if [[ $1 ]]; then builtin declare -- OLDPWD="$2"; else builtin unset -v OLDPWD; fi
builtin set --
builtin umask {umask}
builtin shopt -s extglob
builtin eval {functions}
builtin eval {aliases}
}} >/dev/null 2>&1
"""
_BASH_SAVE = '{ __palaestra_save "$?"; } 2>/dev/null'
# A command's own EXIT trap must not take the place of ours: `trap` puts the two together. In a function, as it has to
# be, "-" cannot reset the ERR, DEBUG and RETURN traps.
_BASH_FUNCTIONS = """\
__palaestra_save() {{
    {{
        builtin local -
        builtin shopt -p; builtin set +o; builtin printf '\\0'
        builtin set +e
        builtin pwd; builtin printf '\\0'
        builtin umask; builtin printf '\\0'
        builtin unset -v BASH_EXECUTION_STRING BASH_CMDS __palaestra_exit
        builtin declare -p; builtin printf '\\0'
        builtin declare -f; builtin declare -F; builtin printf '\\0'
        builtin alias -p; builtin printf '\\0'
    }} >&{kept}
    builtin return "$1"
}}
trap() {{
    {{ builtin local - __palaestra_status=0; builtin set +x; }} 2>/dev/null
    if [[ $BASHPID != "$$" ]]; then builtin trap "$@"; builtin return; fi
    builtin trap -- "${{__palaestra_exit--}}" EXIT
    builtin trap "$@" || __palaestra_status=$?
    builtin set -- "$(builtin trap -p EXIT)"
    if [[ $1 ]]; then
        builtin eval "builtin set -- $1"
        __palaestra_exit=$3
    else
        builtin unset -v __palaestra_exit
    fi
    builtin trap -- {save}$'\\n'"${{__palaestra_exit-}}" EXIT
    builtin return "$__palaestra_status"
}}
builtin trap -- {save} EXIT
"""
_BASH_FIELDS = 6
_ODD_NAME = re.compile(rb"^([^\s()]*=[^\s()]*) \(\) \n\{ \n", re.MULTILINE)

_SH_STATE = """\
exec {given}<&-
{exports}
cd -- {folder} 2>/dev/null || {{
cd /workspace
printf 'sh: %s: the working directory of the session is gone; going on in /workspace\\n' {folder} >&2
}}
"""
_SH_TRAP = """\
trap '{{ printf "%s\\0" "$PWD"; export -p; printf "\\0"; }} >&{to} 2>/dev/null' EXIT
"""
_SH_FIELDS = 2


class Sessions:
    """The sessions of one cell by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Session] = {}
        self._bash = _find("bash")

    def get(self, name: str) -> Session:
        """The session of this name, which begins with its first command. Raises ValueError for one too many."""
        if name not in self._by_name:
            if len(self._by_name) >= MAX_SESSIONS:
                raise ValueError(f"more than {MAX_SESSIONS} sessions")
            self._by_name[name] = Session(self._bash)
        return self._by_name[name]


class Session:
    """One session: the state that its last command left, None before the first."""

    def __init__(self, bash: str | None) -> None:
        self._bash = bash
        self._fields = _BASH_FIELDS if bash else _SH_FIELDS
        self._state: tuple[bytes, ...] | None = None

    def keep(self, data: bytes, total: int) -> str:
        """Take the state that a command sent (its first ``MAX_STATE_BYTES``, and how much there was).

        Returns what to tell the agent, or nothing. A shell that sent no complete state, because it was replaced
        (``exec``) or killed, leaves the session as it was.
        """
        if total > len(data):
            return f"the session stays as it was: its state has {total} bytes, more than {MAX_STATE_BYTES}\n"
        fields = data.split(b"\0")
        if len(fields) == self._fields + 1 and not fields.pop():
            self._state = tuple(fields)
        return ""

    def program(self, command: str, env: Mapping[str, str]) -> tuple[str, list[str], dict[str, str]]:
        """File, arguments and environment to execute; the shell's own variables are those of the state."""
        own = {} if self._state is not None else dict(os.environ)
        own.update((name, value) for name, value in env.items() if not _IDENTIFIER.fullmatch(name))
        if self._bash is None:
            return "/bin/sh", ["sh", "-c", f". {_START}; {command}"], own
        own["BASH_ENV"] = _START
        return self._bash, ["bash", "-c", "--", command], own

    def start_file(self, env: Mapping[str, str], kept_fd: int) -> bytes:
        """What the new shell reads first: the state of the session, then the variables in ``env``."""
        exports = b"".join(
            b"export %s=%s || :\n" % (os.fsencode(name), _quoted(os.fsencode(value)))
            for name, value in env.items()
            if _IDENTIFIER.fullmatch(name)
        )
        numbers = {"given": STATE_FROM_FD, "to": STATE_TO_FD, "kept": kept_fd}
        if self._bash is None:
            return self._sh_file(exports, numbers)
        save = _quoted(_BASH_SAVE.encode())
        parts = [_BASH_OPENING.format(**numbers).encode()]
        if self._state is not None:
            options, folder, umask, variables, functions, aliases = self._state
            texts = {
                "own": _BASH_OWN.encode(),
                "variables": _quoted(variables),
                "folder": _quoted(folder[:-1]),  # without the newline of pwd
                "umask": _quoted(umask.strip()),
                "functions": _quoted(_ODD_NAME.sub(rb"function \1 () \n{ \n", functions)),
                "aliases": _quoted(aliases),
            }
            parts.append(_filled(_BASH_STATE, texts))
        parts.append(_filled(_BASH_FUNCTIONS, {"kept": str(kept_fd).encode(), "save": save}))
        if self._state is not None:
            parts.append(b"builtin eval %s >/dev/null 2>&1\n" % _quoted(options))
        parts.append(b"{ %s} 2>/dev/null\n" % exports if exports else b"")
        return b"".join(parts)

    def _sh_file(self, exports: bytes, numbers: Mapping[str, int]) -> bytes:
        given, to = (str(numbers[name]).encode() for name in ("given", "to"))
        if self._state is None:
            state = _filled("exec {given}<&-\n", {"given": given})
        else:
            folder, kept = self._state
            state = _filled(_SH_STATE, {"given": given, "exports": kept, "folder": _quoted(folder)})
        return state + exports + _filled(_SH_TRAP, {"to": to})


def _filled(template: str, texts: Mapping[str, bytes]) -> bytes:
    """``template.format(**texts)``, where the texts are any bytes."""
    filled = template.format(**{name: text.decode("latin-1") for name, text in texts.items()})
    return filled.encode("latin-1")


def _quoted(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


def _find(program: str) -> str | None:
    for folder in os.environ.get("PATH", os.defpath).split(":"):
        path = os.path.join(folder, program)
        if os.access(path, os.X_OK):
            return path
    return None
