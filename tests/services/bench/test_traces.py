"""Traces: each format by a small file, the published ones by their counts, broken ones by their error."""

import gzip
from pathlib import Path

import pytest

from services.bench.traces import TraceError, TraceRequest, read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951691,396,109\r\n"
)
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}\n'
    '{"timestamp": 1250, "input_length": 20, "output_length": 6, "hash_ids": []}\n'
)


def write(folder: Path, text: str, *, zipped: bool = False) -> Path:
    # The name says nothing on purpose: the content decides.
    path = folder / "trace.data"
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_an_azure_trace_counts_from_its_first_request(tmp_path: Path, zipped: bool) -> None:
    trace = read_trace(write(tmp_path, AZURE, zipped=zipped))
    assert trace.has_arrivals
    assert trace.requests[0] == TraceRequest(0.0, 374, 44)
    assert trace.requests[1].arrival_s == pytest.approx(4.3145791, abs=2e-6)
    assert (trace.requests[1].prompt_tokens, trace.requests[1].output_tokens) == (396, 109)


@pytest.mark.parametrize("zone", ["+00:00", "Z", "+05:30"])
def test_one_with_a_zone_and_six_digits_or_none_does_too(tmp_path: Path, zone: str) -> None:
    """As Azure's of 2024 has them."""
    rows = f"2024-05-10 00:00:00.009930{zone},2162,5\n2024-05-10 00:00:01{zone},2399,6\n"
    first, second = read_trace(write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)).requests
    assert first == TraceRequest(0.0, 2162, 5)
    assert second.arrival_s == pytest.approx(1 - 0.00993, abs=1e-6)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_mooncake_trace_keeps_its_prefix_blocks(tmp_path: Path, zipped: bool) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE, zipped=zipped))
    assert trace.requests == (TraceRequest(0.0, 1000, 5, (7, 8)), TraceRequest(0.25, 20, 6))


def test_a_trace_of_splitwise_sim_counts_from_its_first_request(tmp_path: Path) -> None:
    text = "request_id,arrival_timestamp,batch_size,prompt_size,token_size\n0,1.5,1,413,43\n1,1.75,1,20,6\n"
    trace = read_trace(write(tmp_path, text))
    assert trace.requests == (TraceRequest(0.0, 413, 43), TraceRequest(0.25, 20, 6))


def test_a_workload_of_simdistserve_says_how_long_each_comes_after_the_one_before(tmp_path: Path) -> None:
    text = "prompt_tokens,output_tokens,unit_interarrival_s\n186,228,0.5\n19,171,0.75\n12,21,0.25\n"
    path = write(tmp_path, text)
    expected = (TraceRequest(0.0, 186, 228), TraceRequest(0.75, 19, 171), TraceRequest(1.0, 12, 21))
    # What one reading added up is not the next one's.
    assert read_trace(path).requests == read_trace(path).requests == expected


def test_lengths_alone_have_no_arrivals(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "num_prefill_tokens,num_decode_tokens,pd_ratio\n3,4,0.75\n"))
    assert trace.requests == (TraceRequest(None, 3, 4),)
    assert not trace.has_arrivals


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + "broken\r\n")
    assert len(read_trace(path, limit=2).requests) == 2
    with pytest.raises(TraceError, match="line 4"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [
        ("", 1, "header"),
        ("a,b,c\n1,2,3\n", 1, "TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", 1, "no request"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.1+x,1,1\n",
            2,
            "must be a time such as",
        ),
        (AZURE + "2023-11-16 18:15:59,1\n", 4, "3 columns, has 2"),
        (AZURE + "yesterday,1,2\n", 4, "yesterday"),
        (AZURE + "2023-11-16 18:15:59,many,2\n", 4, "many"),
        (AZURE + "2023-11-16 18:15:59,0,2\n", 4, "prompt of 0 tokens: must have 1 to"),
        (AZURE + "2023-11-16 18:15:49,5,2\n", 4, "before the one above"),
        (AZURE + f"2023-11-16 18:15:59,{10**24},2\n", 4, "must have 1 to 1,000,000,000"),
        (AZURE + "2023-11-16 18:15:59,5,1.5\n", 4, "GeneratedTokens = '1.5': must be a whole number"),
        (
            "arrived_at,num_prefill_tokens,num_decode_tokens\nnan,5,2\n",
            2,
            "arrived_at = 'nan': must be a number of seconds",
        ),
        ("prompt_tokens,output_tokens,unit_interarrival_s\n5,2,0\n5,2,-1\n", 3, "before the one above"),
        (MOONCAKE + '{"timestamp": 2000, "input_length": 5}\n', 3, "output_length"),
        (MOONCAKE + "{\n", 3, "Mooncake"),
        (
            '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}\n',
            1,
            "more than input_length",
        ),
        (
            '{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [1]}\n',
            1,
            "prompt of -5 tokens: must have 1 to ",
        ),
    ],
)
def test_a_broken_row_names_file_line_and_rule(tmp_path: Path, text: str, line: int, rule: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert caught.value.line == line
    assert rule in caught.value.rule
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"\x1f\x8bnot gzip after all", b"\xff\xfe\x00binary"])
def test_what_is_not_text_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)
    with pytest.raises(TraceError, match=r"cannot be read: No such file or directory$") as caught:
        read_trace(tmp_path / "missing.csv")
    assert str(caught.value).count("missing.csv") == 1


@pytest.mark.parametrize(
    ("name", "rows", "prompt_mean", "output_mean"),
    [
        ("azure2023/AzureLLMInferenceTrace_code.csv.gz", 8819, 2047.8, 27.9),
        ("azure2023/AzureLLMInferenceTrace_conv.csv.gz", 19366, 1154.7, 211.1),
        ("mooncake/conversation_trace.jsonl.gz", 12031, 12035.1, 342.6),
        ("mooncake/synthetic_trace.jsonl.gz", 3993, 15325.5, 149.1),
        ("vidur/processed_traces/splitwise_conv.csv.gz", 19366, 1154.7, 211.1),
    ],
)
def test_the_published_traces_have_their_published_counts(
    shared_directory: Path, name: str, rows: int, prompt_mean: float, output_mean: float
) -> None:
    requests = read_trace(shared_directory / "data" / name).requests
    assert len(requests) == rows
    assert sum(one.prompt_tokens for one in requests) / rows == pytest.approx(prompt_mean, abs=0.06)
    assert sum(one.output_tokens for one in requests) / rows == pytest.approx(output_mean, abs=0.06)
