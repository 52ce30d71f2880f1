"""The clock goes from moment to moment, and what ends at a moment comes before what arrives."""

from jaxinfer.serving.simulation import Simulation


def run(simulation, following=None):
    """The events as they were handled, and "begin" after those of a moment, with their times."""
    seen = []

    def handle(event):
        seen.append((simulation.now, event))
        for delay, name in (following or {}).pop(event, ()):
            simulation.end(simulation.now + delay, name)

    simulation.run(handle, lambda: seen.append((simulation.now, "begin")))
    return seen


def test_nothing_happens():
    simulation = Simulation[str]()
    assert run(simulation) == []
    assert simulation.now == 0.0


def test_events_come_in_their_order():
    simulation = Simulation[str]()
    for at, name in ((2.0, "late"), (1.0, "a"), (1.0, "b")):
        simulation.arrive(at, name)
    simulation.end(1.0, "ended")
    assert run(simulation) == [(1.0, "ended"), (1.0, "a"), (1.0, "b"), (1.0, "begin"), (2.0, "late"), (2.0, "begin")]


def test_what_follows_at_the_same_moment_comes_before_anything_begins():
    simulation = Simulation[str]()
    simulation.arrive(1.0, "a")
    simulation.arrive(1.0, "b")
    seen = run(simulation, {"a": [(0.0, "at once"), (3.0, "later")]})
    assert seen == [(1.0, "a"), (1.0, "at once"), (1.0, "b"), (1.0, "begin"), (4.0, "later"), (4.0, "begin")]
