"""RUN/warnings.jsonl."""

import math

from g2rpo.run.warnings_file import WARNINGS, append_warning, read_warnings, truncate_warnings


def test_warnings_are_lines_of_json_that_a_resumed_run_cuts(tmp_path):
    assert read_warnings(tmp_path) == []
    append_warning(tmp_path, 3, "collapse", "ünten", metric="tiny_clip", gain=math.nan, more={"a": (1, 2)})
    append_warning(tmp_path, 5, "grid", "a pattern")
    first, second = read_warnings(tmp_path)
    assert first == {
        "step": 3,
        "kind": "collapse",
        "message": "ünten",
        "metric": "tiny_clip",
        "gain": None,
        "more": {"a": [1, 2]},
    }
    assert second == {"step": 5, "kind": "grid", "message": "a pattern"}
    with open(tmp_path / WARNINGS, "a") as file:
        file.write('{"step": 6, "ki')  # the run was killed
    assert len(read_warnings(tmp_path)) == 2
    truncate_warnings(tmp_path, 4)
    assert [line["step"] for line in read_warnings(tmp_path)] == [3]
    append_warning(tmp_path, 5, "grid", "again")
    assert [line["step"] for line in read_warnings(tmp_path)] == [3, 5]
