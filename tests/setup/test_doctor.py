import torch

from g2rpo.setup.doctor import report


def test_what_this_machine_has(tmp_path):
    rows = {row.name: row for row in report(tmp_path / "runs")}
    assert rows["python"].status == "ok" and rows["torch"].detail == torch.__version__
    assert rows[f"disk for {tmp_path / 'runs'}"].detail.endswith("GB free")
    assert ("gpu 0" in rows) == torch.cuda.is_available()
    assert not (tmp_path / "runs").exists()  # looking makes nothing


def test_what_is_absent_comes_with_the_line_that_installs_it(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    absent = ("pyarrow", "peft")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else real(name))
    rows = {row.name: row for row in report()}
    assert rows["pyarrow"].status == "optional" and rows["pyarrow"].advice == "pip install pyarrow"
    assert rows["peft"].status == "missing" and rows["peft"].advice.startswith("pip install")


def test_every_shortcoming_has_advice(monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for row in report():
        assert row.status == "ok" or row.advice, row


def test_the_prompts_of_the_papers_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = next(row for row in report() if row.name == "hpsv2_train.json")
    assert (
        row.status == "optional"
        and "not in this folder" in row.detail
        and row.advice.startswith("hf download ")
    )
    (tmp_path / "hpsv2_train.json").write_text('["a cat"]')
    row = next(row for row in report() if row.name == "hpsv2_train.json")
    assert row.status == "ok" and "HPDv2" in row.detail and not row.advice
