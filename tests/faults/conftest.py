"""Runs that meet no fault, to compare others with."""

import functools

import pytest

from tests.faults.runs import outcome, train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """A function: flags -> the outcome of a run with them, without faults."""

    @functools.cache
    def outcome_with(*flags):
        root = tmp_path_factory.mktemp("undisturbed")
        assert train(root, *flags) == 0
        return outcome(root / "run")

    return outcome_with


@pytest.fixture(scope="session")
def whole(undisturbed):
    return undisturbed()
