"""The HTML report: one file, the same bytes for the same results, and honest about what is not measured."""

import re
from html.parser import HTMLParser

import pytest

from benchmarks.replay.comparison import rows_of
from benchmarks.replay.html_report import report
from support.replay_results import result, result_with_rows

LOADS = [
    result_with_rows(policy, seconds, load=load)
    for load, policy, seconds in ((0.5, "vllm", 10.0), (0.5, "a<b", 9.0), (2.0, "vllm", 50.0), (2.0, "a<b", 20.0))
]


class Elements(HTMLParser):
    """Every opening tag with its attributes, and every tag that was not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page():
    return report(LOADS, rows_of(LOADS))


def test_the_page_is_well_formed_and_fetches_nothing(page):
    elements = Elements(page)
    assert elements.open == []
    assert not {"script", "link", "img", "iframe", "image"} & {tag for tag, _ in elements.seen}
    references = [value for _, attributes in elements.seen for key, value in attributes.items() if key.endswith("href")]
    assert all(value.startswith("#") for value in references)
    assert "url(http" not in page


def test_it_has_every_plot(page):
    titles = re.findall(r"<title>(.*?)</title>", page)
    for title in (
        "Throughput against load",
        "Completion times, load 2",
        "Time by cause, load 0.5",
        "Time by cause of each program, vllm",
        "KV cache over time, a&lt;b",
        "Time to live against the wait, vllm",
    ):
        assert title in titles


def test_names_are_escaped(page):
    assert "a<b" not in page
    assert "a&lt;b" in page


def test_plots_take_the_colour_of_the_page(page):
    assert "currentColor" in page
    assert "#010203" not in page


def test_the_same_results_give_the_same_bytes(page):
    assert report(LOADS, rows_of(LOADS)) == page


def test_it_says_what_is_not_calibrated_and_what_was_left_out():
    results = [
        result_with_rows("vllm", 10.0, load=None, uncalibrated_because=["nobody measured it"], left_out={"too long": 3})
    ]
    page = report(results, rows_of(results))
    assert "Uncalibrated: d: nobody measured it." in page
    assert "left out: 3 programs too long" in page


def test_a_load_that_has_only_a_name_gives_no_curve_against_load():
    results = [result_with_rows("vllm", 10.0, load=None), result_with_rows("continuum", 10.0, load=None)]
    assert "Throughput against load" not in report(results, rows_of(results))


def test_runs_of_which_only_figures_are_known_are_not_drawn_by_cache_or_wait():
    results = [result("vllm", 10.0, by_program=[], load=None)]
    assert "KV cache over time" not in report(results, rows_of(results))
