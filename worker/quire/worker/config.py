"""The settings of a worker from its command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.serving.addresses import Address, UnixAddress
from quire.serving.dialing import DialOptions
from quire.serving.options import ServerOptions
from quire.worker.adapter_bounds import DEFAULT_BOUNDS

NO_FUSED_UPDATES = "fused modules add updates of adapters in kernels only, which need a GPU"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker's settings; `quire worker --help` describes the flags."""

    server: ServerOptions
    cachemgr: Address
    cachemgr_dial: DialOptions
    advertise: Address | None
    model: str
    pool: str
    dtype: str
    kv_dtype: str
    device: str
    attention: str
    layer_groups: Literal["auto", "one"]
    cuda_graphs: bool
    max_graph_tokens: int | None
    dependent_launch: bool | None
    step_graph: Literal["parts", "one"]
    wait: Literal["block", "spin"]
    max_whole_graph_tokens: int
    block_size: int
    num_blocks: int | None
    kv_cache_memory_bytes: int | None
    host_memory_bytes: int
    holder: UnixAddress | None
    """The socket of the process that keeps the pool's memory."""
    verify_kept_blocks: bool
    memory_share: float | None
    max_model_len: int | None
    max_num_seqs: int
    max_step_tokens: int
    max_draft_tokens: int
    threads: int
    step_timeout_s: float | None
    profile: Path | None
    profile_steps: tuple[int, int]
    revision: str | None
    trust_remote_code: bool
    fuse: bool | None
    deterministic: bool
    products: Literal["auto", "own", "library"]
    tensor_parallel_size: int
    quantization: Literal["int8", "fp8"] | None = None
    """How plain weights are quantized at load."""
    host_cache_share: float = 0.0
    """The part of the host tier for copies of evicted blocks, 0 to 1."""
    disk_dir: Path | None = None
    """The directory of the disk below the host tier."""
    disk_memory_bytes: int = 0
    disk_write_rate: int = 200 << 20
    """The limit of bytes written there, per second."""
    lora: tuple[tuple[str, Path], ...] = ()
    """The adapters: name and folder."""
    enable_lora: bool = False
    """Take memory for adapters at start, on a GPU."""
    max_loras: int = DEFAULT_BOUNDS.max_adapters
    max_lora_rank: int = DEFAULT_BOUNDS.max_rank
    lora_memory_bytes: int = DEFAULT_BOUNDS.max_bytes

    @property
    def has_ranks(self) -> bool:
        """True if the worker is a group of several ranks."""
        return self.tensor_parallel_size > 1

    @property
    def _ranks(self) -> str:
        return f"--tensor-parallel-size {self.tensor_parallel_size}"

    @property
    def conflict(self) -> str | None:
        """The flags that exclude each other, with the reason, for people; None if there are none."""
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            return "--num-blocks and --kv-cache-memory exclude each other."
        if self.holder is not None and self.has_ranks:
            return f"--holder excludes {self._ranks}: it keeps the memory of one process."
        if self.quantization is not None and self.has_ranks:
            return f"--quantization excludes {self._ranks}: quantized weights are not divided among ranks."
        if self.verify_kept_blocks and self.holder is None:
            return "--verify-kept-blocks needs --holder."
        if self.host_cache_share and not self.host_memory_bytes:
            return "--host-cache-share needs --host-memory."
        if (self.disk_dir is None) != (self.disk_memory_bytes == 0):
            return "--disk-dir and --disk-memory need each other."
        if self.disk_dir is not None and not self.host_cache_share:
            return "--disk-dir needs --host-cache-share: copies go to the disk and come back through the host tier."
        if self.disk_dir is not None and self.has_ranks:
            return f"--disk-dir excludes {self._ranks}: each rank has a part of a block."
        if self.wants_adapters and (conflict := self.adapter_conflict or self._lora_conflict()) is not None:
            return conflict
        if not self.deterministic:
            return None
        if self.has_ranks:
            return f"--deterministic excludes {self._ranks}: a sum over ranks has no fixed order."
        if self.attention == "flashinfer":
            return "--deterministic excludes --attention flashinfer: it divides keys by the batch."
        if self.products != "auto":
            return f"--deterministic excludes --products {self.products}: its products have tiles of their own."
        return None

    @property
    def wants_adapters(self) -> bool:
        """True if a worker on a GPU has memory for adapters."""
        return self.enable_lora or bool(self.lora)

    @property
    def adapter_conflict(self) -> str | None:
        """The flag that excludes adapters, with the reason, for people; None if there is none."""
        if self.has_ranks:
            return f"--lora excludes {self._ranks}: an adapter's weights are not divided among ranks."
        if self.fuse and self.device == "cpu":
            return f"--lora excludes --fuse on a CPU: {NO_FUSED_UPDATES}."
        return None

    def _lora_conflict(self) -> str | None:
        names = [name for name, _ in self.lora]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            return f"--lora gives the name {repeated} twice."
        if self.model_name in names:
            return f"--lora gives the name {self.model_name}, which is the model's."
        if len(names) > self.max_loras:
            return f"--lora is given {len(names)} times; --max-loras is {self.max_loras}."
        return None

    @property
    def model_name(self) -> str:
        """The model's name for people: a folder's last part, or the hub id."""
        path = Path(self.model)
        return path.resolve().name if path.exists() else self.model

    @property
    def tokenizer(self) -> str:
        """The location of the tokenizer for clients: an absolute path, or the hub id."""
        path = Path(self.model)
        return str(path.resolve()) if path.exists() else self.model
