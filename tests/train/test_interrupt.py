"""Ctrl-C at a safe point."""

import signal
import threading
import time

import pytest

from jaxaccel import train


def test_first_interrupt_waits_for_the_check(capsys):
    with pytest.raises(KeyboardInterrupt):
        with train.SafeInterrupt() as interrupt:
            interrupt.check()
            signal.raise_signal(signal.SIGINT)
            reached = True
            interrupt.check()
    assert reached
    assert "Ctrl-C again" in capsys.readouterr().err


def test_second_interrupt_stops_at_once():
    reached = False
    with pytest.raises(KeyboardInterrupt):
        with train.SafeInterrupt():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            reached = True
    assert not reached


def test_interrupt_after_the_last_check_is_not_lost():
    with pytest.raises(KeyboardInterrupt):
        with train.SafeInterrupt():
            signal.raise_signal(signal.SIGINT)


def test_the_handler_before_comes_back_and_errors_pass():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="mine"):
        with train.SafeInterrupt():
            assert signal.getsignal(signal.SIGINT) != before
            signal.raise_signal(signal.SIGINT)
            raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) == before


def test_an_interrupt_before_a_break_arrives_after_it():
    def loop():
        with train.SafeInterrupt():
            yield

    with pytest.raises(KeyboardInterrupt):
        for _ in loop():
            signal.raise_signal(signal.SIGINT)
            break
        time.sleep(10)


def test_other_threads_are_left_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with train.SafeInterrupt() as interrupt:
            interrupt.check()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
