"""The tables that stages exchange: every column with its unit and meaning.

A column's unit and doc travel in the Parquet file (field metadata). Raise a schema's `version` when the
meaning of a column changes; `tables.read` then refuses older files by name instead of misreading them.
"""

import pyarrow as pa

from lib.contracts.statuses import Status

# Of the trace, and, of programs of MetaSchedule's spaces, of PerStoreFeature: see lib.search.features.
N_FEATURES = 76 + 2 * 164
FEATURE_VERSION = "nest-3+per-store-tvm-0.27"  # a model trained on other features must not score these


def _col(name: str, dtype: pa.DataType, unit: str, doc: str, *, null: bool = False) -> pa.Field:
    return pa.field(name, dtype, nullable=null, metadata={"unit": unit, "doc": doc})


def _list_of(dtype: pa.DataType) -> pa.DataType:
    # Parquet names a list's child "element"; any other name is lost when the file is read back.
    return pa.list_(pa.field("element", dtype, nullable=False))


def _schema(table: str, version: int, columns: list[pa.Field]) -> pa.Schema:
    return pa.schema(columns, metadata={"table": table, "version": str(version)})


SUBGRAPHS = _schema(
    "subgraphs",
    2,
    [
        _col("subgraph_id", pa.string(), "1", "digest of the workload's canonical text"),
        _col("name", pa.string(), "1", "the fused function's name in module.json; for people only"),
        _col("functions", _list_of(pa.string()), "1", "all of module.json with this workload, of whatever channels"),
        _col("weight", pa.int32(), "calls", "how often one inference calls it"),
        _col("flop", pa.float64(), "FLOP", "per call; a multiply-add is 2, exp and erf are 0"),
        _col("core_operator", pa.string(), "1", "what its heaviest block computes, read from the TIR"),
        _col("operators", _list_of(pa.string()), "1", "what each block computes, in order"),
        _col("tunable", pa.bool_(), "1", "false: compiled as it is, no trials"),
        _col("note", pa.string(), "1", "why it is not tunable; empty if it is"),
        _col("workload", pa.string(), "JSON", "its IRModule, as tvm.ir.save_json writes it"),
    ],
)

MODELS = _schema(
    "models",
    1,
    [
        _col("name", pa.string(), "1", "of the model's folder"),
        _col("importance", pa.float64(), "1", "what a second of it counts beside the others; 0: is not measured"),
        _col("error", pa.string(), "1", "why it could not be imported; empty if it was"),
        _col("subgraphs", _list_of(pa.string()), "1", "its tunable ones: keys of SUBGRAPHS"),
        _col("calls", _list_of(pa.int32()), "calls", "of each of these in an inference"),
    ],
)

SHARED = _schema(
    "shared",
    1,
    [
        _col("subgraph_id", pa.string(), "1", "key of SUBGRAPHS"),
        _col("group", pa.int32(), "1", "subgraphs of a model's shapes with the same one read the same weights"),
    ],
)

FAMILIES = _schema(
    "families",
    1,
    [
        _col("subgraph_id", pa.string(), "1", "key of SUBGRAPHS"),
        _col("family_id", pa.string(), "1", "subgraphs with the same one share a cost model; a file name"),
    ],
)

PLAN = _schema(
    "plan",
    2,
    [
        _col("subgraph_id", pa.string(), "1", "key of SUBGRAPHS"),
        _col("family_id", pa.string(), "1", "key of FAMILIES"),
        _col(
            "kind",
            pa.string(),
            "1",
            "recalled | exhausted (recalled, and there is no more) | warm-up | refit (programs that pack weights as "
            "other shapes do) | bottleneck | foresee | turn",
        ),
        _col("num_trials", pa.int32(), "trials", "how many candidates are asked for"),
        _col("promise", pa.float64(), "s", "what further tuning is expected to save per inference", null=True),
        _col("note", pa.string(), "1", "why this subgraph, for the log"),
        _col("num_spared", pa.int32(), "trials", "of a first look without a model, that the model made needless"),
    ],
)

CANDIDATES = _schema(
    "candidates",
    4,
    [
        _col("candidate_id", pa.string(), "1", "digest of subgraph and trace"),
        _col("subgraph_id", pa.string(), "1", "key of SUBGRAPHS"),
        _col("family_id", pa.string(), "1", "key of FAMILIES"),
        _col("origin", pa.string(), "1", "untuned (an empty trace) | sampled | evolved | refit | adapted | imported"),
        _col("space", pa.string(), "1", "whose program it is: a space of this project by its name (contraction, ...); "
             "metaschedule: TVM's, also where a space of this project fails; none: untuned; imported: a database's"),
        _col("program_hash", pa.string(), "1", "TVM's structural hash of the scheduled module: equal programs"),
        _col("score", pa.float32(), "1", "the family model's prediction; null if there was none", null=True),
        _col("trace", pa.string(), "JSON", "schedule decisions, postprocessors included"),
        _col("donor", pa.string(), "1", "of an adapted one: the subgraph whose trace it was; empty for others"),
        _col("features", _list_of(pa.float32()), "1",
             f"the first of at most {N_FEATURES}, see lib.search.features; empty where none are known"),
    ],
)  # fmt: skip

# Equal wherever two latencies may be compared: `lib.contracts.conditions`.
_CONDITIONS = pa.struct(
    [
        _col("target", pa.string(), "JSON", "tvm.target.Target that it was compiled for"),
        _col("threads", pa.int32(), "threads", "of TVM's pool while it ran"),
        _col("weights", pa.string(), "1", "cold: each run reads them from memory; warm: from caches"),
        _col("lowering", pa.string(), "1", "how programs become machine code: lib.tir.lowering.Lowering.text"),
        _col("timing", pa.int32(), "revision", "of how programs are timed: lib.measure.timing"),
        _col("device", pa.string(), "1", "kind of device: the CPU's model name, a GPU's, or the key at a tracker"),
        _col("versions", pa.string(), "1", "of the libraries that compiled it"),
    ]
)

MEASUREMENTS = _schema(
    "measurements",
    2,
    [
        _col("candidate_id", pa.string(), "1", "key of CANDIDATES"),
        _col("subgraph_id", pa.string(), "1", "key of SUBGRAPHS"),
        _col("status", pa.string(), "1", " | ".join(Status)),
        _col("latencies", _list_of(pa.float64()), "s", "one mean per repeat, in run order; empty unless ok"),
        _col("error", pa.string(), "1", "what failed; null if ok", null=True),
        _col("build_s", pa.float64(), "s", "replaying the trace and compiling"),
        _col("run_s", pa.float64(), "s", "filling arguments and timing"),
        _col("measured_at", pa.float64(), "s", "Unix time at the end of the measurement"),
        _col("host", pa.string(), "1", "name of the machine that ran it"),
        _col("device", pa.string(), "1", "what ran it: a CPU, a GPU, or a server at a tracker"),
        _col("conditions", _CONDITIONS, "1", "what its latencies may be compared with: those with equal ones"),
    ],
)

# A candidate with its measurement, as the memory keeps it: what the search of any later run may need of it.
REMEMBERED = _schema(
    "remembered",
    3,
    [
        _col("core_operator", pa.string(), "1", "of its subgraph"),
        _col("operators", _list_of(pa.string()), "1", "of its subgraph"),
        *(field for field in CANDIDATES if field.name not in ("family_id", "score")),  # a run's own
        *(field for field in MEASUREMENTS if field.name not in ("candidate_id", "subgraph_id")),
    ],
)

# How the memory was written before: with features that say something else, ...
REMEMBERED_2 = _schema("remembered", 2, list(REMEMBERED))
# ... and before programs had one vector of them: rows of each store.
REMEMBERED_1 = _schema(
    "remembered",
    1,
    [
        field if field.name != "features"
        else field.with_type(_list_of(pa.list_(pa.field("element", pa.float32(), nullable=False), 164)))
        for field in REMEMBERED if field.name != "donor"
    ],
)  # fmt: skip

TRAINING = _schema(
    "training",
    2,
    [
        _col("family_id", pa.string(), "1", "key of FAMILIES"),
        _col("num_samples", pa.int32(), "candidates", "that the model was trained on; 0 if it has none yet"),
        _col("model", pa.string(), "1", "file of the model, relative to the run; empty if it has none yet"),
        _col("model_digest", pa.string(), "1", "of that file; empty if it has none yet"),
        _col("num_predicted", pa.int32(), "candidates", "of this round, scored before they were trained on"),
        _col("pairwise_accuracy", pa.float64(), "1", "share of their pairs ordered right", null=True),
        _col("noise_ceiling", pa.float64(), "1", "share of those that the first and the last repeat order alike: "
             "what can be foretold at most", null=True),
        _col("rank_correlation", pa.float64(), "1", "Spearman's, predicted score with speed", null=True),
        _col("top_recall", pa.float64(), "1", "share of the fastest eighth among the best scored quarter", null=True),
        _col("regrets", _list_of(pa.float64()), "1", "of the best of the first 1, 2, ... programs of subgraphs that "
             "such a model was not trained on, against the fastest; empty where that is not known, or there is a base "
             "model, which has its own"),
    ],
)  # fmt: skip

RESULTS = _schema(
    "results",
    1,
    [
        _col("subgraph_id", pa.string(), "1", "key of SUBGRAPHS"),
        _col("family_id", pa.string(), "1", "key of FAMILIES; empty if not tunable"),
        _col("candidate_id", pa.string(), "1", "what was shipped; null: the untuned schedule", null=True),
        _col("untuned_s", pa.float64(), "s", "latency of TVM's default schedule, timed again if near", null=True),
        _col("tuned_s", pa.float64(), "s", "latency of what was shipped, in the same interleaved run", null=True),
        _col("max_error", pa.float64(), "1", "against the untuned program, relative to its largest value", null=True),
        _col("note", pa.string(), "1", "why what was shipped was shipped"),
    ],
)  # fmt: skip
