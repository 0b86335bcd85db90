"""vLLM in this process: one `AsyncLLM`, and vLLM's own OpenAI chat serving over it.

vLLM is imported inside functions: it reads its environment at import, and that has to be set before.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_program.errors import EngineUnavailable
from agent_program.turn import TurnHints
from engine_replicas import embedded_model
from engine_replicas.engine_config import CPU_BLOCK_SIZE, Device, EngineSettings

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine_replicas.vllm_chat import ObservedChat
    from engine_replicas.vllm_turn import VllmTurn

_TEMPLATES = Path(__file__).parent / "templates"
_GIB = 1024**3

logger = logging.getLogger(__name__)


def set_environment(settings: EngineSettings) -> None:
    """Tell vLLM, and the processes that it starts, what it takes from the environment. What is set already stays."""
    values = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": settings.engine_log_level}
    if settings.device is Device.CPU:
        # Without this a replica binds its threads to cores, and two replicas bind to the same ones.
        values["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if settings.cpu_threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(settings.cpu_threads)
    if settings.is_embedded:
        values["HF_HUB_OFFLINE"] = "1"
    for name, value in values.items():
        os.environ.setdefault(name, value)


def model_path(settings: EngineSettings) -> str:
    """Where vLLM finds the model; prepares the embedded one."""
    return str(embedded_model.prepare()) if settings.is_embedded else settings.model


def chat_template_path(settings: EngineSettings) -> str | None:
    """The template file, or None for the model's own."""
    if settings.chat_template is not None:
        return settings.chat_template
    return str(_TEMPLATES / "smollm2_tools.jinja") if settings.is_embedded else None


def engine_arguments(settings: EngineSettings, scheduling: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for vLLM's `AsyncEngineArgs`; `scheduling` is the plain form of the scheduler's settings."""
    is_cpu = settings.device is Device.CPU
    kv_cache_gib = settings.kv_cache_gib or (1.0 if is_cpu else None)
    chosen: dict[str, Any] = {
        "model": model_path(settings),
        "served_model_name": [settings.model_name],
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "enable_prefix_caching": True,
        "enforce_eager": is_cpu if settings.enforce_eager is None else settings.enforce_eager,
        "block_size": settings.block_size or (CPU_BLOCK_SIZE if is_cpu else None),
        "kv_cache_memory_bytes": int(kv_cache_gib * _GIB) if kv_cache_gib else None,
        "num_gpu_blocks_override": settings.num_gpu_blocks_override,
        "max_num_seqs": settings.max_num_seqs or (16 if is_cpu else None),
        "max_num_batched_tokens": settings.max_num_batched_tokens or (2048 if is_cpu else None),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_log_requests": False,
    }
    if settings.tensor_parallel_size > 1:
        chosen["distributed_executor_backend"] = settings.tensor_parallel_executor.value
    if settings.scheduler_cls is not None:
        chosen["scheduler_cls"] = settings.scheduler_cls
        chosen["additional_config"] = {"continuum": scheduling}
    return {name: value for name, value in chosen.items() if value is not None} | settings.engine_args


class VllmEngine:
    """A running engine. The constructor starts its processes and waits until the model is loaded (tens of seconds)."""

    def __init__(self, settings: EngineSettings, scheduling: dict[str, Any]):
        """Start the engine.

        Args:
            settings: which model runs, and how.
            scheduling: the plain form of the scheduler's settings.

        Raises:
            EngineUnavailable: vLLM is not installed, or not the build for this device.
            Exception: what vLLM raises for settings that it cannot run.
        """
        self._settings = settings
        set_environment(settings)
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
        except ImportError as exc:
            raise EngineUnavailable(f"vLLM cannot be imported: {exc}") from exc
        if current_platform.is_cpu() is not (settings.device is Device.CPU):
            found = current_platform.device_type or "nothing"
            raise EngineUnavailable(f"device: {settings.device.value}, but the installed vLLM runs on {found}")
        from engine_replicas.vllm_chat import ObservedAsyncLLM

        arguments = AsyncEngineArgs(**engine_arguments(settings, scheduling))
        self._llm: AsyncLLM = ObservedAsyncLLM.from_engine_args(arguments)
        self._chat: ObservedChat | None = None

    async def start_serving(self) -> None:
        """Build the chat serving, as vLLM's API server does; in the event loop that will serve."""
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.renderers.chat_utils import load_chat_template
        from vllm.renderers.online_renderer import OnlineRenderer

        from engine_replicas import vllm_tool_parser
        from engine_replicas.vllm_chat import ObservedChat

        vllm_tool_parser.register()
        settings = self._settings
        template = chat_template_path(settings)
        shared: dict[str, Any] = {
            "request_logger": None,
            "chat_template": load_chat_template(Path(template)) if template else None,
            "chat_template_content_format": "auto",
            "enable_auto_tools": settings.tool_call_parser is not None,
            "tool_parser": settings.tool_call_parser,
            "tool_strict_level": settings.tool_strict_level.value,
            "reasoning_parser": settings.reasoning_parser or "",
        }
        renderer = OnlineRenderer(self._llm.model_config, self._llm.renderer, **shared)
        renderer.warmup()
        models = OpenAIServingModels(self._llm, [BaseModelPath(name=settings.model_name, model_path=settings.model)])
        await models.init_static_loras()
        self._chat = ObservedChat(
            self._llm, models, "assistant", online_renderer=renderer, enable_prompt_tokens_details=True, **shared
        )

    def turn(self, body: dict[str, Any], hints: TurnHints | None) -> VllmTurn:
        """A turn for `body`, not opened yet.

        Raises:
            InvalidRequest: a field of the body is missing, malformed or out of range.
        """
        from engine_replicas.vllm_turn import VllmTurn, chat_request

        assert self._chat is not None, "start_serving comes first"
        return VllmTurn(self._chat, chat_request(body), hints, timeout_s=self._settings.turn_timeout_s)

    def forget_program(self, program_id: str) -> None:
        """The program is over: its tokens need not be remembered."""
        if self._chat is not None:
            self._chat.token_memory.forget(program_id)

    def token_continuity(self) -> dict[str, int]:
        """Prompts of programs, by how their tokens relate to the turn before."""
        counts = self._chat.token_memory.counts if self._chat is not None else {}
        return {continuity.value: count for continuity, count in counts.items()}

    async def models(self) -> dict[str, Any]:
        """OpenAI's list of models."""
        assert self._chat is not None, "start_serving comes first"
        return (await self._chat.models.show_available_models()).model_dump(mode="json")

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core, between two of its steps."""
        return await self._llm.engine_core.call_utility_async(method, *args)

    async def check_health(self) -> None:
        """Raise if the engine core, or a worker of it, is dead.

        Raises:
            EngineUnavailable: it is.
        """
        if self._llm.errored:
            raise EngineUnavailable("the engine core is dead") from self._llm.dead_error

    @property
    def context_tokens_max(self) -> int:
        """Tokens that a turn's prompt and output may have together."""
        return int(self._llm.model_config.max_model_len)

    @property
    def kv_blocks(self) -> int:
        """KV blocks of the pool, vLLM's null block left out."""
        return max(0, (self._llm.vllm_config.cache_config.num_gpu_blocks or 0) - 1)

    @property
    def turns_unfinished(self) -> int:
        """Requests in the engine, waiting and running."""
        return self._llm.get_num_unfinished_requests()

    @property
    def process_ids(self) -> list[int]:
        """The engine core's processes that this process started."""
        manager = self._llm.engine_core.resources.engine_manager
        return [process.pid for process in getattr(manager, "processes", ()) if process.pid is not None]

    def shutdown(self) -> None:
        """Stop the engine's processes; waits for them, then ends them by force."""
        self._llm.shutdown(timeout=self._settings.shutdown_timeout_s)
