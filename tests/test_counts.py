"""Limits of what `benchmarks.counts` counts: lower a limit when its count has fallen."""

from benchmarks import counts

LIMITS = {
    "functions of 70 lines or more": 4,
    "classes of 400 lines or more": 0,
    "names of several classes": 8,
    "imports of generation in experts and elastic": 0,
    "calls of Costs.open": 1,
    "names by which services are asked and counted": 8,
    "lines of what runs stateless batches": 1200,
    "lines of Service": 250,
}


def test_no_count_is_above_its_limit():
    found = counts.count()
    assert found.keys() == LIMITS.keys()
    assert {name: count for name, count in found.items() if count > LIMITS[name]} == {}


def test_what_is_counted(tmp_path, capsys):
    rooms = {"jaxinfer/experts": "A", "jaxinfer/models": "A", "jaxinfer/elastic": "Service"}
    for room, name in rooms.items():
        (tmp_path / room).mkdir(parents=True)
        imports = "import jaxinfer.generation.api\nfrom jaxinfer.generation import LLM\n"
        body = f"class {name}:\n    def submit(self): ...\n" + "    x = 1\n" * 400
        (tmp_path / room / "service.py").write_text(imports + body)
    found = counts.count(tmp_path)
    assert found["classes of 400 lines or more"] == 3
    assert found["names of several classes"] == 1
    assert found["imports of generation in experts and elastic"] == 4
    assert found["names by which services are asked and counted"] == 1
    assert found["lines of Service"] == 402
    counts.main([str(tmp_path), str(tmp_path)])
    assert f"lines of Service{402:>40}{402:>8}" in capsys.readouterr().out
