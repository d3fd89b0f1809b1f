"""Runs in a cell: run the solution as a program, with its own stdin and stdout.

The path stands in ``PALAESTRA_PROGRAM``, because argv is not at hand in every interpreter. One byte on file
descriptor 3 says that the driver came up; the descriptor is closed before the program is loaded.
"""

from __future__ import annotations


def main() -> None:
    # Imported here and not at the top: the program gets this module's namespace, and finds it empty.
    import os
    import sys

    path = os.environ["PALAESTRA_PROGRAM"]
    os.write(3, b"r")
    os.close(3)
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.argv = [path]
    namespace = globals()
    hook = sys.__excepthook__
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        for name in [name for name in namespace if not name.startswith("__")]:
            del namespace[name]
        namespace["__file__"] = path
        exec(code, namespace)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - printed as the interpreter would, without the driver's frames
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename != path:
            tb = tb.tb_next
        hook(type(error), error.with_traceback(tb), tb)
        sys.exit(1)


if __name__ == "__main__":
    main()
