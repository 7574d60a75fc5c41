"""The signed plan: whole and genuine it is read, anything else is refused with the reason."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.model import token
from crater_slurm.model.plan import Plan

KEY = b"k" * 32
OTHER = b"o" * 32
PLAN = Plan(
    id="0123456789ab",
    gpus=2,
    gpu_type="a100",
    cpus=8,
    memory_mib=65536,
    memory_bandwidth_gb_s=140.5,
    ssd_iops=800_000,
    cache_gb=200,
    numa="strict",
    domains=1,
    precision="bf16",
    checkpoint="/project/ckpt",
    shards=3,
    slices=31,
    gpu_memory_mib=2160,
    card="l4",
    checkpoint_keep=3,
    checkpoint_keep_every=1000,
    checkpoint_credentials="own:research",
    stage="/project/data,s3://bucket/more",
    ring_gb=16,
)
SIGNED = token.SignedPlan(PLAN, user_id=1000, cluster="hpc", issued=1_700_000_000, array=True)


def payload_of(text: str) -> dict[str, object]:
    middle = text.split(".")[1]
    decoded = json.loads(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)))
    assert isinstance(decoded, dict)
    return decoded


def forged(payload: dict[str, object], key: bytes) -> str:
    body = base64.urlsafe_b64encode(json.dumps(payload).encode()).rstrip(b"=").decode()
    signature = token._b64(token._signature(key, "1." + body))
    return f"crater-plan:1.{body}.{signature}"


def test_a_signed_plan_comes_back_whole() -> None:
    assert token.verify(token.sign(SIGNED, KEY), [KEY], 1000, "hpc") == SIGNED


def test_every_field_of_a_plan_travels() -> None:
    assert set(token._SHORT) == {f.name for f in dataclasses.fields(Plan)}
    assert len(set(token._SHORT.values()) | {"u", "z", "t", "r"}) == len(token._SHORT) + 4
    assert all(getattr(PLAN, f.name) for f in dataclasses.fields(Plan)), "the sample lacks one"


def test_a_plan_of_before_gpus_were_shared_is_still_read() -> None:
    older = {"i": "0123456789ab", "g": 1, "a": "strict", "u": 1000, "z": "hpc", "t": 1}
    signed = token.verify(forged(older, KEY), [KEY], 1000, "hpc")
    assert signed is not None
    assert signed.plan == Plan(id="0123456789ab", gpus=1, numa="strict")
    assert (signed.plan.shards, signed.plan.gpu_memory_mib) == (0, None)


def test_what_a_later_version_adds_to_a_plan_is_passed_over() -> None:
    later = {"i": "0123456789ab", "h": 3, "Q": "new", "u": 1000, "z": "hpc", "t": 1}
    signed = token.verify(forged(later, KEY), [KEY], 1000, "hpc")
    assert signed is not None
    assert signed.plan == Plan(id="0123456789ab", shards=3)


def test_the_user_s_own_comment_stands_around_it_unharmed() -> None:
    comment = f"for the paper {token.sign(SIGNED, KEY)} and the appendix"
    assert token.verify(comment, [KEY], 1000, "hpc") == SIGNED
    assert token.strip(comment) == "for the paper and the appendix"
    assert token.find(comment) == token.sign(SIGNED, KEY)


def test_a_comment_without_a_plan_has_none() -> None:
    assert token.verify("for the paper", [KEY], 1000, "hpc") is None
    assert token.find("for the paper") is None
    assert token.read_unverified("for the paper") is None


def test_a_plan_signed_with_another_key_is_refused() -> None:
    with pytest.raises(token.TokenError, match="not signed with this cluster's plan key"):
        token.verify(token.sign(SIGNED, OTHER), [KEY], 1000, "hpc")


def test_no_key_means_no_plan() -> None:
    with pytest.raises(token.TokenError, match="not signed"):
        token.verify(token.sign(SIGNED, KEY), [], 1000, "hpc")


def test_a_copied_plan_is_worthless_to_another_user() -> None:
    with pytest.raises(token.TokenError, match="belongs to uid 1000, not to 1001"):
        token.verify(token.sign(SIGNED, KEY), [KEY], 1001, "hpc")


def test_a_plan_of_another_cluster_is_refused() -> None:
    with pytest.raises(token.TokenError, match="is for cluster hpc, not for lab"):
        token.verify(token.sign(SIGNED, KEY), [KEY], 1000, "lab")


def test_a_plan_with_more_gpus_written_into_it_is_refused() -> None:
    genuine = token.sign(SIGNED, KEY)
    richer = payload_of(genuine) | {"g": 8}
    body = base64.urlsafe_b64encode(json.dumps(richer).encode()).rstrip(b"=").decode()
    changed = f"crater-plan:1.{body}.{genuine.rpartition('.')[2]}"
    with pytest.raises(token.TokenError, match="not signed"):
        token.verify(changed, [KEY], 1000, "hpc")


@pytest.mark.parametrize(
    "comment",
    [
        "crater-plan:",
        "crater-plan:1",
        "crater-plan:1.abc",
        "crater-plan:1..abc",
        "crater-plan:2.abc.def",
        "crater-plan:1.abc.def.ghi",
        "crater-plan:1.a=b.def",
        "crater-plan:1.abc.def;",
    ],
)
def test_a_damaged_token_is_refused_and_never_taken_for_none(comment: str) -> None:
    with pytest.raises(token.TokenError, match="damaged"):
        token.verify(comment, [KEY], 1000, "hpc")
    assert token.strip(f"mine {comment}") == "mine"


def test_every_cut_of_a_token_is_refused() -> None:
    whole = token.sign(SIGNED, KEY)
    for length in range(len(token.PREFIX), len(whole)):
        with pytest.raises(token.TokenError):
            token.verify(whole[:length], [KEY], 1000, "hpc")


def test_every_changed_character_is_noticed() -> None:
    whole = token.sign(SIGNED, KEY)
    # The last character carries 2 bits of the 16 bytes only; its other bits mean nothing.
    for i in range(len(token.PREFIX), len(whole) - 1):
        changed = whole[:i] + ("A" if whole[i] != "A" else "B") + whole[i + 1 :]
        with pytest.raises(token.TokenError):
            token.verify(changed, [KEY], 1000, "hpc")


def test_old_keys_verify_until_they_are_taken_away() -> None:
    old = token.sign(SIGNED, OTHER)
    assert token.verify(old, [KEY, OTHER], 1000, "hpc") == SIGNED
    assert token.verify(token.sign(SIGNED, KEY), [KEY, OTHER], 1000, "hpc") == SIGNED
    with pytest.raises(token.TokenError):
        token.verify(old, [KEY], 1000, "hpc")


@pytest.mark.parametrize("missing", ["i", "u", "z", "t"])
def test_a_genuine_token_of_another_version_is_refused_in_words(missing: str) -> None:
    payload = payload_of(token.sign(SIGNED, KEY))
    del payload[missing]
    with pytest.raises(token.TokenError, match="can't be read by this version"):
        token.verify(forged(payload, KEY), [KEY], 1000, "hpc")


def test_fields_that_are_not_set_are_not_sent() -> None:
    small = token.sign(token.SignedPlan(Plan(id="a"), 0, "hpc", 1), KEY)
    assert payload_of(small) == {"a": "best_effort", "i": "a", "t": 1, "u": 0, "z": "hpc"}
    assert token.verify(small, [KEY], 0, "hpc") == token.SignedPlan(Plan(id="a"), 0, "hpc", 1)


def test_a_token_leaves_most_of_the_comment_to_the_user() -> None:
    assert len(token.sign(SIGNED, KEY)) <= 420
    data = (
        "checkpoint_keep",
        "checkpoint_keep_every",
        "checkpoint_credentials",
        "stage",
        "ring_gb",
    )
    plain = dataclasses.replace(PLAN, **dict.fromkeys(data))
    assert len(token.sign(dataclasses.replace(SIGNED, plan=plain), KEY)) <= 320
    assert len(token.sign(token.SignedPlan(Plan(id="0" * 12), 1000, "hpc", 1), KEY)) <= 140


def test_the_payload_can_be_shown_but_the_words_say_it_is_unverified() -> None:
    shown = token.read_unverified(token.sign(SIGNED, OTHER))
    assert shown is not None
    assert token.plan_fields(shown) == dataclasses.asdict(PLAN)
    assert token.read_unverified("crater-plan:1.bm9uZQ.abc") is None  # "none" is no JSON
    assert token.read_unverified("crater-plan:1.WzFd.abc") is None  # [1] is no object


def test_a_forged_payload_shows_only_what_could_be_a_plan() -> None:
    forgery = {"g": "many", "h": [3], "w": None, "l": True, "e": 4, "i": "p\x1b[2J", "n": 8}
    shown = token.read_unverified(forged(forgery, OTHER))
    assert shown is not None
    assert token.plan_fields(shown) == {"cpus": 8}


@settings(max_examples=200)
@given(st.text(max_size=100))
def test_no_comment_is_taken_for_a_plan(comment: str) -> None:
    for text in (comment, token.PREFIX + comment, token.PREFIX + "1." + comment):
        with contextlib.suppress(token.TokenError):
            assert token.verify(text, [KEY], 1000, "hpc") is None
        assert token.PREFIX not in token.strip(text)


def test_a_comment_of_blanks_takes_no_time() -> None:
    begin = time.process_time()
    token.strip(" " * (1 << 20))
    token.find("crater-plan:1." * (1 << 16))
    assert time.process_time() - begin < 1
