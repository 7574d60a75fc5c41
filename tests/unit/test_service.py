"""The scheduler put together: what one part reports reaches the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from crater_slurm.config import Settings
from crater_slurm.config.score import Score
from crater_slurm.model.plan import Decision, Mode, Verdict
from crater_slurm.scheduler import predicting
from crater_slurm.scheduler.service import Service, tolerance_alone
from crater_slurm.store.repository import Store


def settings(folder: Path, **sections: Any) -> Settings:
    return Settings.model_validate(
        {
            "store": {"url": f"sqlite:///{folder}/crater.db"},
            "plan": {"key_file": str(folder / "plan.key")},
            "filter": {"socket": str(folder / "filter.sock"), "mode": "enforce"},
            "slurm": {"bin_dir": str(folder)},
            **sections,
        }
    )


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(settings(tmp_path))
    with Store.open(made.settings.store.url, create=True) as store:
        store.save_decision(
            Decision(
                id="p1",
                verdict=Verdict.PLANNED,
                mode=Mode.ENFORCE,
                time=1.0,
                user_id=1000,
                request={"gpus": 1, "model": "Llama-3-8B", "min_gpu_utilization_percent": 65},
            )
        )
    yield made


def report(percent: float | None, **fields: Any) -> dict[str, Any]:
    figures = {"gpu_utilization_mean_percent": percent, "gpu_memory_peak_mib": 20_000}
    base = {
        "job_id": "7", "plan_id": "p1", "node": "n1", "time": 5000.0, "seconds": 1200.0,
        "ended": False, "succeeded": None, "oom_kills": 0, "samples": 40, "gpus": 1,
        "figures": figures,
    }  # fmt: skip
    return base | fields


def test_a_job_that_uses_its_gpus_too_little_is_told_until_it_uses_or_leaves_them(
    service: Service,
) -> None:
    service.take_observation(report(12.0))
    (note,) = service.utilization.notes("p1")
    assert note.startswith("job 7: its GPUs are 12 % busy in the mean of 20 min")
    assert b'crater_job_below_utilization{job="7"} 12.0' in generate_latest(service.registry)
    service.take_observation(report(70.0))
    assert service.utilization.notes("p1") == []
    service.take_observation(report(12.0))
    service.take_observation(report(12.0, ended=True, succeeded=True))
    assert service.utilization.notes("p1") == []


def test_a_job_of_an_unknown_plan_promised_nothing(service: Service) -> None:
    service.take_observation(report(12.0, plan_id="other"))
    assert service.utilization.notes("other") == []


def test_each_stage_is_off_where_the_site_says_so(tmp_path: Path) -> None:
    made = Service(settings(tmp_path, prediction={"enabled": False}, score={"fragmentation": 0.0}))
    assert made.preferring is None
    assert made._predictor()(None, None) is predicting.NOTHING  # type: ignore[arg-type]
    assert Service(settings(tmp_path, score={"prefer": False})).preferring is None
    assert Service(settings(tmp_path)).preferring is not None


@pytest.mark.parametrize(
    ("fragmentation", "tolerance", "alone"),
    [(0.9, 0.01, 0.1), (0.5, 0.01, 0.02), (0, 0.01, 0.01), (1, 0.01, 1), (0.9, 0.5, 1)],
)
def test_the_rest_of_the_score_alone_decides_no_more_than_beside_fragmentation(
    fragmentation: float, tolerance: float, alone: float
) -> None:
    own = Score(fragmentation=fragmentation, tolerance=tolerance)
    assert tolerance_alone(own) == pytest.approx(alone)
