"""Progress, log files, colours, and no secrets anywhere."""

import io
import logging
import os
import re
import shlex
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import dstrain
import pytest
from dstrain import StepNumbers, console
from dstrain.console import (
    as_table,
    fitted,
    get_logger,
    logging_to_file,
    progress_bar,
    redacted,
    shell_command,
    status,
)
from dstrain.runs import OwnParts

from tests.support.command_lines import Terminal
from tests.support.other_platform import OF_OS, without

pytestmark = pytest.mark.usefixtures("tiny")
Printed = pytest.CaptureFixture[str]
TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUv"


class Clock:
    """The time that bars see, which passes where a test says so."""

    now = 1.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("tqdm.std.time", made)
    return made


def python(
    code: str, *words: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=True,
    )


def test_elsewhere_than_on_a_terminal_there_is_a_line_a_minute_and_more_at_first(
    clock: Clock, capsys: Printed
) -> None:
    with progress_bar("train", 401, done=1) as bar:
        for _ in range(390):
            clock.wait(0.5)
            bar.set_postfix_str("loss 1", refresh=False)
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert lines[4] == "train 33/401, 2.00/s, 03:04 left, loss 1"
    shown = [int(line.split()[1].partition("/")[0]) for line in lines]
    assert shown == [3, 5, 9, 17, 33, 65, 129, 249, 369, 391]


def test_a_notebook_has_a_bar_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    kernel = SimpleNamespace(config={"IPKernelApp": {}})
    shell = SimpleNamespace(get_ipython=lambda: kernel)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    with warnings.catch_warnings(), progress_bar("train", 3) as bar:
        warnings.simplefilter("error")
        bar.update()
    shown = capsys.readouterr()
    assert "train:  33%" in shown.out
    assert shown.err == ""  # red, in a notebook
    # No notebook: a script, and IPython in a terminal.
    for other in (None, SimpleNamespace(config={})):
        shell.get_ipython = lambda other=other: other
        with progress_bar("train", 3) as bar:
            bar.update()
        assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("is_brief", [False, True])
def test_what_takes_little_time_says_nothing_and_what_is_brief_tells_no_end(
    is_brief: bool, clock: Clock, capsys: Printed
) -> None:
    with progress_bar("preview", 3, brief=is_brief) as bar:
        clock.wait(40 if is_brief else 0.9)
        bar.update()
        assert capsys.readouterr().err == ""
        clock.wait(40)
        bar.update()
        assert capsys.readouterr().err.startswith("preview 2/3, ")
        bar.update()
    assert is_brief == (capsys.readouterr().err == "")
    with redirect_stderr(Terminal()) as terminal, progress_bar("a", 1, brief=is_brief):
        pass
    assert terminal.getvalue().endswith("\r" if is_brief else "\n")


def test_other_processes_neither_show_bars_nor_log(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.setenv("RANK", "1")
    with (
        redirect_stderr(Terminal()) as terminal,
        status(),
        progress_bar("train", 2) as bar,
    ):
        bar.update()
    with progress_bar("train", 3) as bar, status():
        clock.wait(1000)
        bar.update()
        get_logger("dstrain.runs").warning("a line")
    assert capsys.readouterr().err == terminal.getvalue() == ""


def test_a_bar_and_its_numbers_fit_80_columns_of_a_terminal(clock: Clock) -> None:
    import termios  # Windows has none

    terminal, descriptors = Terminal(), os.openpty()
    termios.tcsetwinsize(descriptors[1], (24, 80))
    vars(terminal)["fileno"] = lambda: descriptors[1]
    with redirect_stderr(terminal), progress_bar("train", 6000, done=1000) as bar:
        for _ in range(240):
            clock.wait(1.2)
            bar.set_postfix_str("loss 0.0512 (20 steps) lr 9.9e-05", refresh=False)
            bar.update()
    for descriptor in descriptors:
        os.close(descriptor)
    last = terminal.getvalue().rpartition("\r")[2].rstrip("\n")
    assert last.startswith("train 21%|")
    assert last.endswith("lr 9.9e-05")
    assert "1240/6000  0.83/s, 1:35:11 left, loss 0.0512 (20 steps)" in last
    assert len(last) <= 80


def test_a_script_without_settings_sees_warnings_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from dstrain.console import get_logger, logging_to_file\n"
        "logger = get_logger('dstrain.runs')\n"
        f"logger.info('step 1')\nlogger.warning('no {TOKEN}')\n"
        "with logging_to_file() as open_file:\n"
        "    open_file(Path(sys.argv[1]))\n"
        "    logger.warning('look')"
    )
    path = tmp_path / "a.log"
    assert python(code, str(path)).stderr == "no ***\nlook\n"
    assert "WARNING dstrain.runs: look" in path.read_text()


def test_a_program_can_silence_redirect_and_filter(
    caplog: pytest.LogCaptureFixture, capsys: Printed
) -> None:
    own = logging.getLogger("dstrain.runs")
    child = get_logger("dstrain.runs.of_a_test")
    own.setLevel(logging.ERROR)
    try:
        child.warning("silenced")
    finally:
        own.setLevel(logging.NOTSET)
    child.info("token %s", TOKEN)
    child.warning("folder \x1b[2J")
    assert caplog.messages == ["token ***", r"folder \x1b[2J"]
    said = capsys.readouterr().err
    assert said == "token ***\ndstrain: warning: folder \\x1b[2J\n"


def test_lines_that_go_to_a_file_have_their_times_and_no_colours() -> None:
    code = (
        "from dstrain.console import get_logger, logging_to_stderr, progress_bar, status\n"
        "logger = get_logger('dstrain.of_a_test')\n"
        "with logging_to_stderr(), status():\n"
        "    logger.info('a line')\n"
        "    with progress_bar('train', 2) as bar:\n"
        "        bar.delay = 0\n        bar.display()\n"
        "    logger.warning('take care')"
    )
    first, second, *_, last = python(code, TERM="xterm").stderr.splitlines()
    assert first[20:] == "a line"
    assert "train 0/2" in second
    assert last[20:] == "dstrain: warning: take care"
    for line in (first, second, last):
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)


def test_a_terminal_shows_what_is_waited_for_until_there_is_more_to_say() -> None:
    shown, cleared = "working\r", f"\r{' ' * len('working')}\r"
    with redirect_stderr(Terminal()) as terminal, status("working"):
        assert terminal.getvalue() == shown
        get_logger("dstrain.of_a_test").info("a line")
    assert terminal.getvalue() == f"{shown}{cleared}a line\n"
    with (
        redirect_stderr(Terminal()) as terminal,
        status("working"),
        progress_bar("train", 2),
    ):
        pass
    assert terminal.getvalue().startswith(f"{shown}{cleared}\rtrain 0%|")
    with (
        redirect_stderr(Terminal()) as terminal,
        pytest.raises(ZeroDivisionError),
        status("working"),
    ):
        raise ZeroDivisionError
    assert terminal.getvalue() == f"{shown}{cleared}"


@pytest.mark.parametrize(
    ("variables", "is_terminal", "is_coloured"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_only_a_terminal_has_colours_unless_the_environment_says_otherwise(
    variables: dict[str, str],
    is_terminal: bool,
    is_coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with redirect_stderr(Terminal() if is_terminal else io.StringIO()) as stream:
        get_logger("dstrain.of_a_test").warning("take care")
        get_logger("dstrain.of_a_test").info("a line")
        get_logger("dstrain.of_a_test").error("it ends")
    warning, line, error = stream.getvalue().splitlines()
    assert ("\x1b[33m" in warning) == ("\x1b[31m" in error) == is_coloured
    assert "dstrain: warning:" in warning
    assert line == "a line"


def test_lines_are_written_above_open_bars() -> None:
    with (
        redirect_stderr(Terminal()) as terminal,
        progress_bar("train", 3) as bar,
        progress_bar("preview", 2, brief=True),
    ):
        bar.update()
        get_logger("dstrain.runs").info("preview a.png")
    before, _, after = terminal.getvalue().partition("preview a.png\n")
    # The bars are cleared before the line, and drawn again below it.
    assert before.removesuffix("\x1b[A").endswith("\r")
    assert "train 33%" in after


def test_what_a_callback_prints_is_a_line_of_its_own() -> None:
    own = OwnParts(callbacks=[lambda numbers: print(f"step {numbers.step}")])
    numbers = StepNumbers(1, 3, 0, 0.5, 0.1, 0.1, 1.0, 0.0)
    terminal = Terminal()
    with (
        redirect_stderr(terminal),
        redirect_stdout(terminal),
        progress_bar("train", 3) as bar,
    ):
        bar.update()
        assert not own.call(numbers)
    before, _, after = terminal.getvalue().partition("step 1\n")
    assert before.endswith("\r")  # the bar is cleared
    assert "train 33%" in after


@pytest.mark.parametrize(
    "name",
    [
        *("MY_TOKEN", "SECRET", "DB_PASSWORD", "DB_PASSWD", "API_KEY", "ACCESS_KEY"),
        *("CREDENTIALS", "SIGNATURE", "AUTHORIZATION"),
    ],
)
def test_the_values_of_variables_named_like_secrets_are_hidden(name: str) -> None:
    variables = {"A_TOKEN": "ann", name: "pa55word", "ANY_TOKEN": "pa55word-Long"}
    found = redacted("user ann, pa55word pa55word-Long", variables)
    assert found == "user ann, *** ***"
    assert redacted(f"https://e.com/a?{name}=x1") == f"https://e.com/a?{name}=***"


def test_a_log_file_has_earlier_lines_times_and_the_error_that_ended_the_run(
    tmp_path: Path, capsys: Printed
) -> None:
    path = tmp_path / "dstrain.log"
    logger = get_logger("dstrain.runs")
    with logging_to_file():
        logger.info("a log that is never opened leaves no file")
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt), logging_to_file() as open_file:
        logger.info("before")
        open_file(path)
        logger.warning(f"no {TOKEN}")
        assert "before" in path.read_text()  # a line is there as soon as it is logged
        logger.info("details", extra={"file_only": True})
        raise KeyboardInterrupt
    assert "details" not in capsys.readouterr().err
    lines = path.read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO dstrain.runs: before",
        "WARNING dstrain.runs: no ***",
        "INFO dstrain.runs: details",
        "ERROR dstrain.console: KeyboardInterrupt",
    ]
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line)


def test_a_bar_within_another_writes_no_terminal_codes_to_a_log(
    caplog: pytest.LogCaptureFixture, capsys: Printed
) -> None:
    caplog.set_level(logging.INFO)
    with progress_bar("train", 2) as outer:
        outer.delay = 0
        with progress_bar("preview", 2, brief=True) as inner:
            inner.delay = 0
            inner.display()
    assert "preview" in caplog.text
    assert "\x1b" not in caplog.text + capsys.readouterr().err


def test_tables_and_pages_are_broken_between_words_and_indented() -> None:
    head, row = ("name", "variants"), ("a", "one-two, three-four, five")
    assert as_table(head, [row]).splitlines()[1] == "a     one-two, three-four, five"
    assert as_table(head, [row, ("b", "")], width=20).splitlines() == [
        "name  variants",
        "a     one-two, three-four,",
        "      five",
        "b",
    ]
    word = "file-of-a-long-name"
    assert fitted(["head", "", f"    a {' '.join([word] * 5)}"]) == [
        "head",
        "",
        f"    a {word} {word} {word}",
        f"        {word} {word}",
    ]
    columns = f"  f({'x' * 60})      uses {'y' * 20}"
    assert fitted([columns]) == [f"  f({'x' * 60})", f"      uses {'y' * 20}"]
    alone = f"  {'x' * 90}"
    assert fitted([alone]) == [alone]


def test_a_command_is_typed_in_the_quotes_of_the_platforms_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [
        *("dstrain", "--prompt", 'a dog\'s "ball"', "--run", "C:\\my runs\\"),
        *("--quant_options", "dit:fp8;vae:fp8", "--resolution", "64,96"),
        *("--input", "scale=1.5", "--output", "C:\\out\\", "--lora", "a;b\\", ""),
    ]
    assert shell_command(words) == shlex.join(words)
    of_windows = without(os, OF_OS)
    vars(of_windows).update(name="nt")
    monkeypatch.setattr(console, "os", of_windows)
    assert shell_command(words) == (
        'dstrain --prompt "a dog\'s \\"ball\\"" --run "C:\\my runs\\\\"'
        ' --quant_options "dit:fp8;vae:fp8" --resolution "64,96"'
        ' --input scale=1.5 --output C:\\out\\ --lora "a;b\\\\" ""'
    )


def test_every_module_logs_without_secrets_and_quotes_for_every_shell() -> None:
    texts = {
        path.name: path.read_text("utf-8")
        for path in Path(dstrain.__file__).parent.rglob("*.py")
    }
    assert not [name for name in texts if "getLogger(__name__)" in texts[name]]
    quoting = [name for name in texts if re.search(r"shlex\.(join|quote)", texts[name])]
    assert quoting == ["console.py"]
