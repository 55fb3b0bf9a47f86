"""Two processes in one directory: no write fails, and exactly one of two starts wins."""

import os

import pytest

from tests.faults.forked import counts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are made by fork")


def test_processes_with_the_same_number_write_into_one_directory(tmp_path):
    assert counts("together", tmp_path, "writers", 400) == (400, 0)


def test_exactly_one_of_two_starts_gets_the_directory(tmp_path):
    assert counts("together", tmp_path, "starts", 3) == (3, 0)
