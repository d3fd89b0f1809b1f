"""Runs in a fresh cell: judge a solution by a check program that the solution's code can neither read nor touch.

Two processes. The *judge* makes itself non-dumpable, so that no process of the same uid may trace it, read its memory
or open its descriptors through /proc; it forks the *server*, and only then reads the check program from stdin. The
server gives up stdin and the result channel before it loads the agent's code, and answers calls over a pair of pipes
in the codec's text. What the assertions see are values the codec rebuilt in the judge: exact built-in types.

The request on stdin is a Python literal ``(path, entry_point, check, names)``; ``names`` are the further functions of
the solution that the check calls. The report on file descriptor 3 is a line each:

* ``ready`` once the check program is loaded, before the agent's code is; without it the grader is at fault;
* ``passed``, or ``failed <reason>``, or ``fault <reason>`` where the check asked for what no solution could give.

Whatever the server does (exit, kill the judge, hang, answer nonsense), the worst it gets is no ``passed``.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import sys
from typing import Any

from palaestra.envs.grading.drivers.decode import MalformedValue, decode
from palaestra.envs.grading.drivers.encode import UnsupportedValue, ValueTooLarge, encode

MAX_REPLY_BYTES = 4 * 1024 * 1024
_PR_SET_DUMPABLE = 4
# An iterator protocol takes these as the end of a loop: `for x in map(candidate, inputs): assert ...` would stop early.
_NOT_RAISED = (StopIteration, StopAsyncIteration)


class CandidateError(RuntimeError):
    """The solution raised something that is not an ordinary built-in exception."""


class _ServerGone(BaseException):
    """The solution's process ended or answered what it must not; no check may catch this and go on."""


class _BadCheck(BaseException):
    """The check program passed a value of a type that cannot cross; no solution can have returned one."""


def main() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        _report(f"fault prctl(PR_SET_DUMPABLE) failed with errno {ctypes.get_errno()}")
        os._exit(1)
    call_read, call_write = os.pipe()
    reply_read, reply_write = os.pipe()
    if os.fork() == 0:
        _become_server(call_read, reply_write)
    os.close(call_read)
    os.close(reply_write)
    outcome = _judge(_Calls(call_write, reply_read))
    _report(outcome)
    os._exit(0)


def _judge(calls: _Calls) -> str:
    path, entry_point, check, names = eval(sys.stdin.buffer.read())
    namespace: dict[str, Any] = {"__name__": "check"}
    try:
        exec(compile(check, "check.py", "exec", dont_inherit=True), namespace)
        run = namespace["check"]
    except BaseException as error:  # noqa: BLE001 - the check program is at fault whatever it raised
        return f"fault the check program doesn't load: {type(error).__name__}: {error}"
    for name in names:
        namespace[name] = calls.proxy(name)
    _report("ready")
    try:
        calls.load(path)
        run(calls.proxy(entry_point))
    except _BadCheck as error:
        return f"fault the check program passes what cannot cross: {error}"
    except BaseException as error:  # noqa: BLE001 - assertions, the solution's errors, signals: none of them is a pass
        return f"failed {type(error).__name__}"
    return "failed the solution's process ended" if calls.gone else "passed"


def _report(line: str) -> None:
    os.write(3, (line.replace("\n", " ")[:2000] + "\n").encode("utf-8", "backslashreplace"))


class _Calls:
    """The judge's end of the pipes: one call, one reply."""

    def __init__(self, call_write: int, reply_read: int) -> None:
        self._call_write = call_write
        self._replies = os.fdopen(reply_read, "rb")
        self.gone = False
        """Kept apart from the exception, which a bare ``except:`` of a check would swallow."""

    def load(self, path: str) -> None:
        self._round(("load", path))

    def proxy(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._round(("call", name, args, kwargs))

        call.__name__ = name
        return call

    def _round(self, request: Any) -> Any:
        try:
            data = (encode(request) + "\n").encode("ascii")
        except ValueTooLarge:
            raise  # a failed check: what is too large may be what the solution returned
        except UnsupportedValue as error:
            raise _BadCheck(str(error)) from None
        try:
            while data:
                data = data[os.write(self._call_write, data) :]
        except OSError:
            raise self._server_gone() from None
        line = self._replies.readline(MAX_REPLY_BYTES)
        try:
            reply = decode(line)
        except MalformedValue:
            raise self._server_gone() from None
        if type(reply) is tuple and len(reply) == 2 and reply[0] == "value":
            return reply[1]
        if type(reply) is tuple and len(reply) == 3 and reply[0] == "raised" and type(reply[1]) is str:
            raise _rebuilt(reply[1], str(reply[2]))
        raise self._server_gone()

    def _server_gone(self) -> _ServerGone:
        self.gone = True
        return _ServerGone("the solution's process ended or gave no well-formed reply")


def _rebuilt(name: str, message: str) -> Exception:
    """The exception a check may expect, as a fresh built-in one."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_RAISED):
        try:
            return kind(message)
        except TypeError:  # such as UnicodeDecodeError, which takes five arguments
            pass
    return CandidateError(f"{name}: {message}")


def _become_server(call_read: int, reply_write: int) -> None:
    """Never returns: whatever happens in here, this process must not fall back into the judge's code."""
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in range(3, 256):
            if descriptor not in (call_read, reply_write):
                try:
                    os.close(descriptor)
                except OSError:
                    pass
        _serve(os.fdopen(call_read, "rb"), reply_write)
    finally:
        os._exit(1)


def _serve(calls: Any, replies: int) -> None:
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.path.insert(0, os.getcwd())
    namespace: dict[str, Any] = {}
    for line in calls:
        request = decode(line)
        try:
            if request[0] == "load":
                namespace, value = _load(request[1]), None
            else:
                if request[1] not in namespace:
                    raise NameError(f"name {request[1]!r} is not defined")
                value = namespace[request[1]](*request[2], **request[3])
            reply = encode(("value", value))
        except BaseException as error:  # noqa: BLE001 - whatever the agent's code raises is a reply
            reply = encode(("raised", type(error).__name__, str(error)[:2000]))
        data = (reply + "\n").encode("ascii")
        while data:
            data = data[os.write(replies, data) :]


def _load(path: str) -> dict[str, Any]:
    module = type(sys)(path.rsplit("/", 1)[-1].rsplit(".", 1)[0])
    module.__dict__["__file__"] = path
    sys.modules[module.__name__] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module.__dict__


if __name__ == "__main__":
    main()
