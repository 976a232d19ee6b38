"""How long the command line takes to answer: seconds from the start of a process to its
end.

`--help` and `models` import neither torch nor a plugin. The floors are Python itself
and Python with click imported.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
from report import table

DSTRAIN = str(Path(sys.executable).with_name("dstrain"))
COMMANDS = {
    "python -c pass": (sys.executable, "-c", "pass"),
    "python -c 'import click'": (sys.executable, "-c", "import click"),
    "dstrain --help": (DSTRAIN, "--help"),
    "dstrain models": (DSTRAIN, "models"),
}


def seconds(command: tuple[str, ...]) -> float:
    """Seconds that one run of a command takes; raises CalledProcessError if it fails."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


@click.command(help=__doc__)
@click.option(
    "--runs", default=10, show_default=True, help="Runs of each command, taking turns."
)
def main(runs: int) -> None:
    """Print a table."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for run in range(-1, runs):
        for name, command in COMMANDS.items():
            last = seconds(command)
            if run >= 0:
                taken[name].append(last)
    rows = [
        (f"`{name}`", f"{statistics.median(part):.3f}", f"{min(part):.3f}")
        for name, part in taken.items()
    ]
    print(table(("command", "median, s", "least, s"), rows))


if __name__ == "__main__":
    main()
