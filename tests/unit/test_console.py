"""Progress: a bar on a terminal, a line a minute elsewhere, on the main process alone;
times in files, colours on terminals.
"""

import io
import logging
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import dstrain
import pytest
from dstrain import GenerateConfig, StepNumbers, console as progress, generate
from dstrain.console import (
    LOADING,
    StderrHandler,
    as_table,
    counted,
    fitted,
    get_logger,
    has_color,
    logging_to_file,
    logging_to_stderr,
    marked,
    number_of,
    printable,
    progress_bar,
    redacted,
    shell_command,
    shell_word,
    silenced,
    status,
)
from dstrain.runs import OwnParts
from tqdm import tqdm

from tests.support.other_platform import OF_OS, without

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let seconds pass."""
    now = [1.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])

    def later(seconds: float) -> None:
        now[0] += seconds

    return later


class Terminal(io.StringIO):
    """A terminal that keeps what it is shown."""

    def isatty(self) -> bool:
        return True


FORKS = """
import os, signal, threading
from dstrain.console import get_logger, logging_to_stderr
from tqdm import tqdm

with logging_to_stderr():
    logger = get_logger("dstrain.forks")
    logger.warning("before")
    {}
    logger.warning("after")
os._exit(0)
"""
KILLED_IN_A_LINE = """
    child = os.fork()
    if child == 0:
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
"""
FORKED_IN_A_LINE = """
    other = threading.Thread(target=tqdm.get_lock().acquire)
    other.start()
    other.join()
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("forks", [KILLED_IN_A_LINE, FORKED_IN_A_LINE])
def test_no_process_waits_for_a_line_of_another(forks: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS.format(forks.strip())],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "after" in done.stderr


def test_elsewhere_than_on_a_terminal_there_is_a_line_a_minute_and_more_at_first(
    wait: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("train", 401, done=1) as bar:
        for _ in range(390):
            wait(0.5)
            bar.set_postfix_str("loss 1", refresh=False)
            bar.update()
    assert capsys.readouterr().err.splitlines() == [
        "train 3/401, 2.00/s, 03:19 left, loss 1",
        "train 5/401, 2.00/s, 03:18 left, loss 1",
        "train 9/401, 2.00/s, 03:16 left, loss 1",
        "train 17/401, 2.00/s, 03:12 left, loss 1",
        "train 33/401, 2.00/s, 03:04 left, loss 1",
        "train 65/401, 2.00/s, 02:48 left, loss 1",
        "train 129/401, 2.00/s, 02:16 left, loss 1",
        "train 249/401, 2.00/s, 01:16 left, loss 1",
        "train 369/401, 2.00/s, 00:16 left, loss 1",
        "train 391/401, 2.00/s, 00:05 left, loss 1",
    ]


def test_a_notebook_has_a_bar_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    shell.get_ipython = lambda: None
    with progress_bar("train", 3) as bar:
        bar.update()
    assert capsys.readouterr().err == ""


def test_widgets_that_a_notebook_lacks_are_not_warned_of_by_other_libraries() -> None:
    code = """
    import sys, warnings
    from types import SimpleNamespace
    kernel = SimpleNamespace(config={"IPKernelApp": {}})
    sys.modules["IPython"] = SimpleNamespace(get_ipython=lambda: kernel)
    sys.modules["ipykernel.zmqshell"] = kernel  # by which tqdm tells a notebook
    sys.modules["ipywidgets"] = None
    import dstrain.console
    warnings.simplefilter("always")
    import tqdm.auto
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_takes_less_than_a_second_says_nothing(
    wait: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("train", 3) as bar:
        wait(0.9)
        bar.update()
    assert capsys.readouterr().err == ""


def test_things_that_are_counted_are_yielded_and_shown_while_they_last(
    monkeypatch: pytest.MonkeyPatch, wait: Callable[[float], None]
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    found = []
    for thing in counted("check rows", "abc", 3):
        found.append(thing)
        wait(1)
    assert found == ["a", "b", "c"]
    said = terminal.getvalue()
    assert "check rows" in said and "2/3" in said
    # It leaves nothing.
    assert said.rstrip("\r").rpartition("\r")[2].strip() == ""


def test_other_processes_say_nothing(
    wait: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "1")
    with progress_bar("train", 3) as bar:
        wait(1000)
        bar.update()
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress_bar("train", 2) as bar:
        bar.update()
    assert capsys.readouterr().err == terminal.getvalue() == ""


def test_what_is_brief_tells_no_end(
    wait: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("preview", 3, brief=True) as bar:
        wait(40)
        bar.update()
        wait(40)
        bar.update()
        bar.update()
    assert capsys.readouterr().err == "preview 2/3, 0.02/s, 00:40 left\n"


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress_bar("train", 2) as bar:
        for loss in (1, 2):
            bar.set_postfix_str(f"loss {loss}", refresh=False)
            bar.update()
    assert "train 100%" in terminal.getvalue()
    assert "loss 2" in terminal.getvalue()


def test_a_bar_and_its_numbers_fit_80_columns(
    monkeypatch: pytest.MonkeyPatch, wait: Callable[[float], None]
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda file: (80, 24))
    with progress_bar("train", 6000, done=1000) as bar:
        for _ in range(240):
            wait(1.2)
            bar.set_postfix_str("loss 0.0512 (20 steps) lr 9.9e-05", refresh=False)
            bar.update()
    last = terminal.getvalue().rpartition("\r")[2].rstrip("\n")
    assert last.endswith(
        "1240/6000  0.83/s, 1:35:11 left, loss 0.0512 (20 steps) lr 9.9e-05"
    )
    assert len(last) <= 80


def test_the_environment_can_hide_bars() -> None:
    code = (
        "from dstrain.console import progress_bar; print(progress_bar('a', 1).disable)"
    )
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "True\n"


def test_generate_shows_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "__init__", partialmethod(tqdm.__init__, mininterval=0))
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    generate(
        GenerateConfig(
            model="tiny",
            toy=True,
            prompt="dog",
            num_inference_steps=3,
            output=tmp_path / "a.png",
        )
    )
    assert "generate 0%" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()


def test_a_script_without_settings_sees_warnings_alone(tmp_path: Path) -> None:
    code = (
        "from dstrain.console import get_logger\n"
        "logger = get_logger('dstrain.runs.loop')\n"
        "logger.info('step 1')\nlogger.warning('no hf_AbCdEfGhIjKlMnOpQrStUv')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "no ***\n"


def test_a_program_can_silence_redirect_and_filter(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    own = logging.getLogger("dstrain.runs")
    child = get_logger("dstrain.runs.loop")
    own.setLevel(logging.ERROR)
    try:
        child.warning("silenced")
    finally:
        own.setLevel(logging.NOTSET)
    child.info("token %s", "hf_AbCdEfGhIjKlMnOpQrStUv")
    assert caplog.messages == ["token ***"]
    assert capsys.readouterr().err == "token ***\n"


def test_only_the_main_process_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    get_logger("dstrain.runs.loop").warning("a line")
    assert capsys.readouterr().err == ""


def test_the_command_line_leaves_loggers_as_they_were() -> None:
    logger = logging.getLogger("dstrain")
    before = (logger.level, list(logger.handlers))
    with logging_to_stderr(), logging_to_stderr():
        assert sum(isinstance(h, StderrHandler) for h in logger.handlers) == 1
    assert (logger.level, logger.handlers) == before


LOGS = """
from dstrain.console import get_logger, logging_to_stderr, progress_bar, status

with logging_to_stderr(), status():
    get_logger("dstrain.of_a_test").info("a line")
    with progress_bar("train", 2) as bar:
        bar.delay = 0
        bar.display()
    get_logger("dstrain.of_a_test").warning("take care")
"""


def test_lines_that_go_to_a_file_have_their_times_and_no_colours() -> None:
    command = [sys.executable, "-c", LOGS]
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = done.stderr.splitlines()
    assert [line[20:] for line in lines[:1] + lines[-1:]] == [
        "a line",
        "dstrain: warning: take care",
    ]
    assert len(lines) > 2 and "train 0/2" in lines[1]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)


def test_a_terminal_shows_what_is_waited_for_until_there_is_more_to_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to_stderr():
        with status():
            get_logger("dstrain.of_a_test").info("elsewhere there is nothing")
        assert capsys.readouterr().err == "elsewhere there is nothing\n"
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        shown = f"{LOADING}\r"
        cleared = f"\r{' ' * len(LOADING)}\r"
        with status():
            assert terminal.getvalue() == shown
            get_logger("dstrain.of_a_test").info("a line")
        assert terminal.getvalue() == f"{shown}{cleared}a line\n"
        with status(), progress_bar("train", 2):
            pass
        said = terminal.getvalue().partition("a line\n")[2]
        assert said.startswith(f"{shown}{cleared}\rtrain 0%|")
        before = terminal.getvalue()
        with pytest.raises(ZeroDivisionError), status():
            raise ZeroDivisionError
        assert terminal.getvalue() == f"{before}{shown}{cleared}"
        monkeypatch.setenv("RANK", "1")
        before = terminal.getvalue()
        with status():
            assert terminal.getvalue() == before


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
    stream = Terminal() if is_terminal else io.StringIO()
    assert has_color(stream) == is_coloured
    line = "dstrain: error: --seed: is none"
    assert (marked(line, stream) != line) == is_coloured
    assert "dstrain: error:" in marked(line, stream)
    assert marked("a line", stream) == "a line"
    monkeypatch.setattr(sys, "stderr", stream)
    with logging_to_stderr():
        get_logger("dstrain.of_a_test").warning("take care")
    assert ("\x1b[33m" in stream.getvalue()) == is_coloured


def test_trials_are_silent_whoever_logs_in_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with logging_to_stderr():
        with silenced():
            get_logger("dstrain.trial").warning("of a trial")
            logging.getLogger("of.a.library").error("of a library")
            warnings.warn("of Python", stacklevel=1)
        get_logger("dstrain.trial").warning("of the run")
    assert capsys.readouterr().err == "dstrain: warning: of the run\n"


def test_lines_are_written_above_open_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress_bar("train", 3) as bar, progress_bar("preview", 2, brief=True):
        bar.update()
        get_logger("dstrain.runs").info("preview a.png")
    before, _, after = terminal.getvalue().partition("preview a.png\n")
    assert before.removesuffix("\x1b[A").endswith(
        "\r"
    )  # the bars are cleared before the line
    assert "train 33%" in after  # and drawn again below it


def test_what_a_callback_prints_is_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    own = OwnParts(callbacks=[lambda numbers: print(f"step {numbers.step}")])
    numbers = StepNumbers(1, 3, 0, 0.5, 0.1, 0.1, 1.0, 0.0)
    with progress_bar("train", 3) as bar:
        bar.update()
        assert not own.call(numbers)
    before, _, after = terminal.getvalue().partition("step 1\n")
    assert before.endswith("\r")  # the bar is cleared
    assert "train 33%" in after


def test_a_script_that_loads_the_library_says_so_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert dstrain.UsageError
    assert not terminal.getvalue()  # torch is here already
    monkeypatch.delitem(sys.modules, "torch")
    assert dstrain.UsageError
    assert terminal.getvalue().startswith(f"{LOADING}\r")
    with pytest.raises(AttributeError):
        _ = dstrain.nothing


@pytest.mark.parametrize(
    "name",
    [
        "MY_TOKEN",
        "SECRET",
        "DB_PASSWORD",
        "DB_PASSWD",
        "API_KEY",
        "ACCESS_KEY",
        "CREDENTIALS",
        "SIGNATURE",
        "AUTHORIZATION",
    ],
)
def test_the_values_of_variables_named_like_secrets_are_hidden(name: str) -> None:
    assert redacted("user ann, pa55word-Long", {name: "pa55word-Long"}) == (
        "user ann, ***"
    )
    assert redacted(f"https://e.com/a?{name}=x1") == f"https://e.com/a?{name}=***"


def test_every_module_that_logs_uses_a_redacting_logger() -> None:
    core = Path(progress.__file__).parent
    plain = [
        path
        for path in core.rglob("*.py")
        if "logging.getLogger(__name__)" in path.read_text()
    ]
    assert plain == []


def test_a_log_file_has_earlier_lines_times_and_the_error_that_ended_the_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "dstrain.log"
    logger = get_logger("dstrain.runs.loop")
    with pytest.raises(ZeroDivisionError), logging_to_file() as open_file:
        logger.info("before")
        open_file(path)
        logger.warning("no hf_AbCdEfGhIjKlMnOpQrStUv")
        assert "before" in path.read_text()  # a line is there as soon as it is logged
        raise ZeroDivisionError("the end")
    lines = path.read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO dstrain.runs.loop: before",
        "WARNING dstrain.runs.loop: no ***",
        "ERROR dstrain.console: the end",
    ]
    assert all(
        re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line) for line in lines
    )


def test_a_log_that_is_never_opened_leaves_no_file(tmp_path: Path) -> None:
    with logging_to_file():
        get_logger("dstrain.runs").info("a line")
    assert not list(tmp_path.iterdir())


def test_a_script_with_a_log_file_still_sees_warnings(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from dstrain.console import get_logger, logging_to_file\n"
        "with logging_to_file() as open_file:\n"
        "    open_file(Path(sys.argv[1]))\n"
        "    get_logger('dstrain.runs').warning('look')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "look\n"
    assert "WARNING dstrain.runs: look" in (tmp_path / "a.log").read_text()


def test_a_bar_within_another_writes_no_terminal_codes_to_a_log(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    with progress_bar("train", 2) as outer:
        outer.delay = 0
        with progress_bar("preview", 2, brief=True) as inner:
            inner.delay = 0
            inner.display()
    assert "preview" in caplog.text
    assert "\x1b" not in caplog.text + capsys.readouterr().err


def test_a_number_has_its_noun_in_the_singular_or_the_plural() -> None:
    assert number_of(1, "row") == "1 row"
    assert number_of(0, "row") == "0 rows"
    assert number_of(1500, "row") == number_of("1,500", "row") == "1,500 rows"
    assert number_of(f"{1.0:.4g}", "epoch") == "1 epoch"
    assert number_of(2, "process", "processes") == "2 processes"


def test_the_last_column_of_a_table_is_wrapped_between_words() -> None:
    head, row = ("name", "variants"), ("a", "one-two, three-four, five")
    assert as_table(head, [row]).splitlines() == [
        "name  variants",
        "a     one-two, three-four, five",
    ]
    assert as_table(head, [row, ("b", "")], width=20).splitlines() == [
        "name  variants",
        "a     one-two, three-four,",
        "      five",
        "b",
    ]


def test_long_lines_of_a_page_are_broken_between_words_and_indented_further() -> None:
    word = "file-of-a-long-name"
    line = "    a " + f"{word} " * 5
    assert fitted(["head", "", line.rstrip()]) == [
        "head",
        "",
        f"    a {word} {word} {word}",
        f"        {word} {word}",
    ]
    columns = f"  f({'x' * 60})      uses {'y' * 20}"
    assert fitted([columns]) == [f"  f({'x' * 60})", f"      uses {'y' * 20}"]
    alone = f"  {'x' * 90}"
    assert fitted([alone]) == [alone]


def test_control_characters_are_escaped_and_lines_stay() -> None:
    assert printable("a\tb\nc é 犬") == "a\tb\nc é 犬"
    assert printable("\x1b[31mred\r\x7f\x9b") == r"\x1b[31mred\r\x7f\x9b"


def test_what_is_logged_has_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with logging_to_stderr():
        get_logger("dstrain.of_a_test").warning("folder \x1b[2J")
    assert capsys.readouterr().err == "dstrain: warning: folder \\x1b[2J\n"


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
    monkeypatch.setattr(progress, "os", of_windows)
    assert shell_command(words) == (
        'dstrain --prompt "a dog\'s \\"ball\\"" --run "C:\\my runs\\\\"'
        ' --quant_options "dit:fp8;vae:fp8" --resolution "64,96"'
        ' --input scale=1.5 --output C:\\out\\ --lora "a;b\\\\" ""'
    )
    assert shell_word("a dog") == '"a dog"'


def test_no_other_module_quotes_a_command_for_one_shell_alone() -> None:
    here = Path(progress.__file__)
    found = [
        path.name
        for path in here.parent.rglob("*.py")
        if re.search(r"shlex\.(join|quote)", path.read_text("utf-8"))
    ]
    assert found == [here.name]
