"""Names from files cannot control the terminal, nor forge lines of the log."""

import logging

from fastvid.errors import FormatError, visible
from fastvid.runtime.progress import LineFormatter

NAME = "a\x1b[2J\n08:00:00 I fake line\u202e\x9b.mp4"


def line(message, *args):
    return LineFormatter().format(logging.LogRecord("fastvid", logging.INFO, "", 0, message, args, None))


def test_hostile_names_are_shown_and_not_obeyed():
    assert visible(NAME) == r"a\x1b[2J\n08:00:00 I fake line\u202e\x9b.mp4"
    assert visible("plain ünïcode 名前.mp4") == "plain ünïcode 名前.mp4"


def test_a_record_with_a_hostile_name_is_one_line():
    written = line("%s: %s", NAME, 3)
    assert written.isprintable()
    assert written.endswith(r"\x9b.mp4: 3")


def test_errors_with_hostile_places_keep_one_line_for_the_message_and_one_for_the_hint():
    text = str(FormatError("tar is cut", file=NAME, hint="copy it again"))
    assert text.splitlines() == [rf"tar is cut [file={visible(NAME)}]", "  hint: copy it again"]
    assert len(line("failed: %s", FormatError("tar is cut", file=NAME)).splitlines()) == 1
