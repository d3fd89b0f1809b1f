"""Runs in a cell: call one function of the solution on many cases and report what came back.

The request, on stdin, is a Python literal ``(path, entry_point, ((args, kwargs), ...))`` with each case again as a
literal in text. The report, on file descriptor 3, is one encoded tuple a line:

* ``("ready",)`` before anything of the agent's has been loaded; without it the grader, not the agent, is at fault;
* ``("load", message)`` if the solution could not be loaded, ``("absent", message)`` if it has no such function;
* ``(index, "value", text)`` with the encoded value, or ``(index, "raised", message)``, or ``(index, "unsupported",
  reason)``.

The agent's code shares this process, so all of it can be forged; but nothing worth knowing is here: expected values
stay on the host, and a forged output is worth no more than a returned one. Lines go out unbuffered, so that a case
that hangs or ends the process leaves those before it standing.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from palaestra.envs.grading.drivers.encode import UnsupportedValue, encode

MAX_VALUE_CHARS = 256 * 1024
MAX_MESSAGE_CHARS = 4000


def main(
    write: Any = os.write,
    end: Any = os._exit,
    hook: Any = sys.__excepthook__,
    sink: Any = io.StringIO,
    raw: Any = encode,
    unsupported: Any = UnsupportedValue,
) -> None:
    """What is trusted is bound as defaults, so that a solution that replaces ``os.write`` breaks only itself."""

    def emit(*report: Any) -> None:
        data = (raw(report) + "\n").encode("ascii")
        while data:
            data = data[write(3, data) :]

    def describe(error: BaseException) -> str:
        """CPython's own message, as its C code prints it: only there does 3.11 suggest names."""
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename != path:
            tb = tb.tb_next
        saved, sys.stderr = sys.stderr, sink()
        try:
            hook(type(error), error.with_traceback(tb), tb)
            text: str = sys.stderr.getvalue()
        finally:
            sys.stderr = saved
        return text[-MAX_MESSAGE_CHARS:]

    path, entry_point, cases = eval(sys.stdin.buffer.read())
    emit("ready")
    stage = "load"
    try:
        module = type(sys)(path.rsplit("/", 1)[-1].rsplit(".", 1)[0])
        module.__dict__["__file__"] = path
        sys.modules[module.__name__] = module
        folder = os.getcwd()
        if folder not in sys.path:
            sys.path.insert(0, folder)
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
        stage = "absent"
        # Evaluated among the solution's names, so that CPython's NameError suggests the nearest of them.
        function = eval(compile(entry_point, path, "eval"), dict(module.__dict__, __builtins__={}))
    except BaseException as error:  # noqa: BLE001 - whatever the agent's code raises is a report
        emit(stage, describe(error))
    else:
        for index, (args, kwargs) in enumerate(cases):
            try:
                value = function(*eval(args), **eval(kwargs))
                text = raw(value)
            except unsupported as error:
                emit(index, "unsupported", str(error))
            except BaseException as error:  # noqa: BLE001 - as above; one case must not end the others
                emit(index, "raised", describe(error))
            else:
                if len(text) > MAX_VALUE_CHARS:
                    emit(index, "unsupported", f"a value of more than {MAX_VALUE_CHARS // 1024} KiB")
                else:
                    emit(index, "value", text)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - the agent may have replaced or closed them; the report is already out
        pass
    end(0)


if __name__ == "__main__":
    main()
