"""Random task graphs, for the tests of the engine and of what reads its timelines."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from hyscale_simulator.graph import Graph, GraphBuilder, Transfer

KINDS = ("attention", "linear", "p2p", "all-gather")
STREAMS = tuple(f"stage{s}/{queue}" for s in range(2) for queue in ("compute", "comm"))
LINKS = {"nic0": 1_000_000_000, "nic1": 3_000_000_000, "spine": 2_000_000_000}

# Kind, streams as a bit mask (several: a collective; none: a milestone), duration, which of the last tasks
# before.
plain_task = st.tuples(
    st.integers(0, len(KINDS) - 1),
    st.sampled_from([1, 2, 4, 8, 1, 2, 4, 8, 1, 4, 0, 3, 10, 15]),
    st.one_of(st.integers(0, 3), st.integers(0, 1000)),
    st.integers(0, 63),
)
# Links as a bit mask, bytes, SMs of each stage in percent: 25 tasks of 3 % each never take all of them.
claims = st.tuples(st.integers(0, 7), st.integers(0, 2000), st.integers(0, 3), st.integers(0, 3))


@st.composite
def task_graphs(draw: st.DrawFn, *, contended: bool = False, max_size: int = 25) -> Graph:
    """A graph of up to `max_size` tasks on four streams; with `contended`, over shared links and SMs."""
    tasks = draw(st.lists(plain_task, min_size=1, max_size=max_size))
    builder = GraphBuilder()
    for link, capacity in LINKS.items():
        builder.link(link, capacity)
    for number, (kind, on, duration, before) in enumerate(tasks):
        streams = [name for bit, name in enumerate(STREAMS) if on >> bit & 1]
        after = [number - 1 - back for back in range(6) if before >> back & 1 and number - 1 - back >= 0]
        transfer, taken = None, {}
        if contended and draw(st.booleans()):
            through, num_bytes, *percents = draw(claims)
            if crossed := tuple(name for bit, name in enumerate(LINKS) if through >> bit & 1):
                transfer = Transfer(crossed, num_bytes)
            shares = {f"stage{s}/compute": percent / 100 for s, percent in enumerate(percents)}
            taken = {stream: share for stream, share in shares.items() if share and stream not in streams}
        builder.add(f"t{number}", KINDS[kind], streams, duration, after, transfer=transfer, sm_taken=taken)
    return builder.build()


@pytest.fixture(scope="session")
def graphs() -> Callable[..., st.SearchStrategy[Graph]]:
    """The strategy above: `data.draw(graphs(contended=True))`."""
    return task_graphs
