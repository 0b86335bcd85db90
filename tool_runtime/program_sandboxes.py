"""Programs and their sandboxes: at most one each, a bounded number alive, and honest news of state that was lost."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from agent_program.clock import Clock
from agent_program.errors import Overloaded, SandboxUnavailable
from agent_program.ids import ProgramId, TenantId
from tool_runtime.config import ToolRuntimeSettings
from tool_runtime.egress_proxy import EgressProxy
from tool_runtime.held_program import HeldProgram
from tool_runtime.live_sandbox import LiveSandbox
from tool_runtime.pool import SandboxView, idle_too_long, over_limit, to_make_room
from tool_runtime.program_sandbox import ProgramReleased, ProgramSandbox, WorkspaceFull
from tool_runtime.sandbox import Sandboxing, SandboxSpec
from tool_runtime.spawning import Launcher
from tool_runtime.trees import usage_of
from tool_runtime.warm_pool import WarmPool
from tool_runtime.workspace_copies import WorkspaceCopies
from tool_runtime.workspace_errors import ArchiveRefused, WorkspaceBusy, WorkspaceTooLarge
from tool_runtime.workspaces import Workspaces

_LOG = logging.getLogger(__name__)

#: Programs without a live sandbox that are remembered, so that a lost session can be told; the oldest is forgotten.
_PROGRAMS_REMEMBERED_MAX = 4096
_RETRY_AFTER_S = 5.0
_HELD_MAX = 1000
#: Between two looks at the workspaces in use: at least this long, and this many times as long as a look takes.
_IDLE_CHECK_S = 30.0
_CLEAN_S = 3600.0
#: On the sandbox's own loopback, where nothing else is.
_PROXY_PORT = 3128
_DISK_WATCH_S, _DISK_WATCH_PAUSE = 1.0, 5.0
#: A call has this long before the workspace is looked at, so that one that deletes files is not stopped for what it deletes;
#: after this many looks in a row that found too much, no more calls run.
_DISK_GRACE_S, _DISK_STRIKES_MAX = 2.0, 3


class ProgramSandboxes:
    """Every program that this actor knows."""

    def __init__(
        self,
        settings: ToolRuntimeSettings,
        launcher: Launcher,
        backend: Sandboxing,
        workspaces: Workspaces,
        clock: Clock,
        proxy: EgressProxy | None = None,
    ) -> None:
        """`proxy` gives sandboxes the network that it allows; without one they have none."""
        self._proxy = proxy
        self._settings = settings
        self._launcher = launcher
        self._backend = backend
        self._workspaces = workspaces
        self._clock = clock
        self._programs: OrderedDict[tuple[TenantId, ProgramId], ProgramSandbox] = OrderedDict()
        self.started = 0
        self.closed_for_room = 0
        #: Closings and releases under way, which whoever waits for them may leave.
        self._closing: set[asyncio.Task[None]] = set()
        #: Sandboxes that are being started, which take room already.
        self._starting = 0
        #: Where sandboxes have files of their own.
        self._copies = WorkspaceCopies(launcher.files, workspaces, settings.limits) if launcher.files else None
        self.warm = WarmPool(self._start, workspaces, settings.warm_sandboxes if backend.has_own_view else 0)

    @property
    def live(self) -> int:
        """Sandboxes that are alive."""
        return len(self._live())

    @contextmanager
    def known(self, tenant_id: TenantId, program_id: ProgramId) -> Iterator[ProgramSandbox]:
        """The program's entry, made if it is new, for as long as a call of the program is under way."""
        key = (tenant_id, program_id)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = ProgramSandbox(tenant_id, program_id)
        program.calls += 1
        self._programs.move_to_end(key)
        self._forget_oldest()
        try:
            yield program
        finally:
            program.calls -= 1

    @asynccontextmanager
    async def use(self, program: ProgramSandbox) -> AsyncIterator[LiveSandbox]:
        """The program's sandbox, started if need be, and kept from being closed for room meanwhile.

        Raises:
            ProgramReleased: meanwhile the program ended.
            WorkspaceFull: its calls were stopped again and again for what its workspace holds.
            SandboxUnavailable: it cannot be started.
            Overloaded: as many sandboxes as may live are busy.
        """
        program.busy += 1
        try:
            async with program.changing:
                if program.is_released:
                    raise ProgramReleased
                if program.disk_strikes >= _DISK_STRIKES_MAX:
                    raise WorkspaceFull(program.disk_excess)
                if program.sandbox is None or not program.sandbox.is_alive:
                    await self._close(program)
                    await self._make_room()
                    self._starting += 1
                    try:
                        program.sandbox = await self._sandbox_for(program)
                    finally:
                        self._starting -= 1
                sandbox = program.sandbox
            if program.busy == 1:
                program.busy_since_s, program.is_disk_unchecked = self._clock.now_s(), True
                await sandbox.watch(is_busy=True)
            await sandbox.wake()
            yield sandbox
        finally:
            program.busy -= 1
            program.last_used_s = self._clock.now_s()
            program.is_sleep_asked = False
            program.has_new_files = self._copies is not None
            if not program.busy and program.sandbox is not None:
                await program.sandbox.watch(is_busy=False)

    @asynccontextmanager
    async def at_rest(self, tenant_id: TenantId, program_id: ProgramId, *, closes: bool) -> AsyncIterator[None]:
        """The program with no call under way, and with `closes` without a sandbox; calls that come meanwhile wait.

        Raises:
            WorkspaceBusy: a call is under way, or the program is just being released.
        """
        with self.known(tenant_id, program_id) as program:
            if program.calls > 1 or program.is_released:
                raise WorkspaceBusy
            async with program.changing:
                if closes:
                    await self._close(program)
                else:
                    await self._fetch_files(program)
                yield

    async def fetch_files(self, tenant_id: TenantId, program_id: ProgramId) -> None:
        """Have the workspace be what the program's sandbox has, where that has files of its own.

        Raises:
            SandboxUnavailable, WorkspaceTooLarge, ArchiveRefused: it cannot be; the workspace is as it last was.
        """
        program = self._programs.get((tenant_id, program_id))
        if program is not None:
            async with program.changing:
                await self._fetch_files(program)

    async def release(self, tenant_id: TenantId, program_id: ProgramId, *, delete_workspace: bool) -> None:
        """Close the program's sandbox and forget the program; with `delete_workspace`, remove its files as well.

        Once begun it is carried through, also when the caller gives up waiting: nobody would come back for the sandbox. Calls
        of the program that wait meanwhile, or come before it is done, find the program released.

        Raises:
            OSError: something in the workspace cannot be removed; it is out of the way all the same.
        """
        releasing = asyncio.create_task(self._release(tenant_id, program_id, delete_workspace))
        self._closing.add(releasing)
        releasing.add_done_callback(self._closing.discard)
        await asyncio.shield(releasing)

    async def _release(self, tenant_id: TenantId, program_id: ProgramId, delete_workspace: bool) -> None:
        key = (tenant_id, program_id)
        # Known until the end, so that no call that comes meanwhile makes a new entry, and with it a new workspace.
        with self.known(tenant_id, program_id) as program:
            program.is_released = True
            try:
                async with program.changing:
                    await self._close(program, keeps_files=not delete_workspace)
                if delete_workspace:
                    await asyncio.to_thread(self._workspaces.delete, tenant_id, program_id)
            finally:
                if self._programs.get(key) is program:
                    del self._programs[key]

    def tenants_of(self, program_id: ProgramId) -> list[TenantId]:
        """The tenants under which a program of this id is known here."""
        return [tenant_id for tenant_id, known_id in self._programs if known_id == program_id]

    async def held(self, quiet_s: float) -> list[HeldProgram]:
        """Programs that have a sandbox or files here and ran nothing for `quiet_s`; no more than a thousand of each."""
        idle = {(one.tenant_id, one.program_id) for one in self._idle_for(quiet_s)[:_HELD_MAX]}
        quiet = await asyncio.to_thread(
            self._workspaces.quiet, quiet_s=quiet_s, now_wall_s=self._clock.wall_s(), count_max=_HELD_MAX
        )
        resting = [key for key in quiet if key not in self._programs or not self._programs[key].calls]
        return [
            HeldProgram(tenant_id=tenant_id, program_id=program_id, is_live=(tenant_id, program_id) in idle)
            for tenant_id, program_id in dict.fromkeys((*idle, *resting))
        ]

    async def check_disks(self) -> float:
        """Look at the workspaces in use, and end what runs in one that holds too much.

        Returns the seconds until they should be looked at again, more if the look took long: so long a disk may fill.
        """
        started_s = self._clock.now_s()
        for program in self._live():
            is_new = program.busy and started_s - program.busy_since_s < _DISK_GRACE_S
            if program.is_disk_unchecked and not is_new:
                await self._check_disk(program)
        return max(_DISK_WATCH_S, _DISK_WATCH_PAUSE * (self._clock.now_s() - started_s))

    async def _check_disk(self, program: ProgramSandbox) -> None:
        limits, sandbox = self._settings.limits, program.sandbox
        program.is_disk_unchecked = program.busy > 0
        if self._copies is not None:
            return  # the disk is the cluster's; what is too large is found when it is copied
        usage = await asyncio.to_thread(
            usage_of,
            self._workspaces.path(program.tenant_id, program.program_id),
            bytes_max=limits.workspace_bytes_max,
            files_max=limits.workspace_files_max,
        )
        program.disk_excess = over_limit(usage, limits)
        program.disk_strikes = program.disk_strikes + 1 if program.disk_excess else 0
        if program.disk_excess and sandbox is not None and sandbox.is_alive:
            await sandbox.exceed(program.disk_excess)

    async def clean(self) -> float:
        """Remove workspaces that nobody will come back for; returns the seconds until it should be done again."""
        for program in self._live():
            self._workspaces.ensure(program.tenant_id, program.program_id)  # which renews it
        removed = await asyncio.to_thread(
            self._workspaces.clean, ttl_s=self._settings.workspace_ttl_s, now_wall_s=self._clock.wall_s()
        )
        if removed:
            _LOG.info("removed %d workspaces that were left behind", removed)
        return _CLEAN_S

    async def rest_idle(self) -> float:
        """Put to sleep what ran nothing for a while, and close what ran nothing for too long.

        Returns the seconds until it should be looked at again.
        """
        sleep_s, ttl_s = self._settings.idle_sandbox_sleep_s, self._settings.idle_sandbox_ttl_s
        for program in self._idle_for(ttl_s):
            await self._close_if_idle(program)
        for program in self._idle_for(sleep_s):
            await self._sleep_if_idle(program)
        return min(sleep_s / 2, ttl_s / 4, _IDLE_CHECK_S)

    def _idle_for(self, seconds: float) -> list[ProgramSandbox]:
        return [self._programs[key] for key in idle_too_long(self._views(), now_s=self._clock.now_s(), ttl_s=seconds)]

    async def _sleep_if_idle(self, program: ProgramSandbox) -> None:
        sandbox = program.sandbox
        # Asked once after each use: what keeps it awake then, a background job say, rarely ends before the next call.
        if sandbox is not None and not program.busy and not program.is_sleep_asked:
            program.is_sleep_asked = True
            await sandbox.sleep()
            async with program.changing:
                await self._keep_files(program)

    async def close(self) -> None:
        """Close every sandbox."""
        await self.warm.close()
        await asyncio.gather(*(self._close(program) for program in self._programs.values()))
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._programs.clear()

    async def _sandbox_for(self, program: ProgramSandbox) -> LiveSandbox:
        parked = self.warm.claim(program.tenant_id, program.program_id)
        if parked is not None:
            return parked
        return await self._start(
            self._workspaces.ensure(program.tenant_id, program.program_id),
            self._workspaces.uid(program.tenant_id, program.program_id),
        )

    async def _start(self, workspace: Path, uid: int | None) -> LiveSandbox:
        port = _PROXY_PORT if self._proxy is not None else None
        spec = SandboxSpec(workspace=workspace, uid=uid, limits=self._settings.limits, proxy_port=port)
        self.started += 1
        sandbox = await LiveSandbox.start(
            self._launcher,
            self._backend.plan(spec),
            timeout_s=self._settings.sandbox_start_timeout_s,
            clock=self._clock,
        )
        if self._copies is not None:
            try:
                await self._copies.copy_in(sandbox.child, workspace)
            except BaseException:
                await sandbox.close()
                raise
        if self._proxy is not None and sandbox.listener is not None:
            sandbox.on_close = (await self._proxy.serve(sandbox.listener)).close
        return sandbox

    async def _make_room(self) -> None:
        while self.live + self._starting >= self._settings.live_sandboxes_max:
            key = to_make_room(self._views())
            if key is None:
                raise Overloaded("every sandbox is busy", retry_after_s=_RETRY_AFTER_S)
            if await self._close_if_idle(self._programs[key]):
                self.closed_for_room += 1

    async def _close_if_idle(self, program: ProgramSandbox) -> bool:
        # Marked busy for the time of closing: nobody else picks it, and a call that comes meanwhile waits and starts anew.
        if program.busy or program.sandbox is None:
            return False
        program.busy += 1
        try:
            async with program.changing:
                await self._close(program)
        finally:
            program.busy -= 1
        return True

    async def _fetch_files(self, program: ProgramSandbox) -> None:
        """Copy out what the sandbox has, unless nothing ran since that was last done. `program.changing` is held."""
        sandbox = program.sandbox
        if self._copies is not None and sandbox is not None and sandbox.is_alive and program.has_new_files:
            program.has_new_files = False  # what is under way meanwhile makes news again when it ends
            try:
                await self._copies.copy_out(sandbox.child, program.tenant_id, program.program_id)
            except BaseException:
                program.has_new_files = True
                raise
            program.disk_excess, program.disk_strikes = None, 0

    async def _keep_files(self, program: ProgramSandbox) -> None:
        """`_fetch_files` where nobody is there to be told: what it finds too large counts as a look at a full disk does."""
        try:
            await self._fetch_files(program)
        except (WorkspaceTooLarge, ArchiveRefused) as exc:
            program.disk_excess, program.disk_strikes = exc.message, program.disk_strikes + 1
            _LOG.warning("the files of a program cannot be kept: %s", exc.message)
        except SandboxUnavailable as exc:
            _LOG.warning("the files of a program were not kept: %s", exc.message)

    async def _close(self, program: ProgramSandbox, *, keeps_files: bool = True) -> None:
        if keeps_files:
            await self._keep_files(program)
        program.are_files_lost |= program.has_new_files and keeps_files
        program.has_new_files = False
        sandbox, program.sandbox = program.sandbox, None
        if sandbox is not None:
            program.all_state_lost()
            # A task of its own, so that whoever is cancelled while waiting for it does not leave it half closed.
            closing = asyncio.create_task(sandbox.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)

    def _live(self) -> list[ProgramSandbox]:
        return [program for program in self._programs.values() if program.sandbox is not None]

    def _views(self) -> list[SandboxView[tuple[TenantId, ProgramId]]]:
        return [
            SandboxView(key=key, is_busy=program.busy > 0, last_used_s=program.last_used_s)
            for key, program in self._programs.items()
            if program.sandbox is not None
        ]

    def _forget_oldest(self) -> None:
        surplus = len(self._programs) - _PROGRAMS_REMEMBERED_MAX - self._settings.live_sandboxes_max
        for key in list(self._programs):
            if surplus <= 0:
                return
            program = self._programs[key]
            if program.sandbox is None and not program.calls:
                del self._programs[key]
                surplus -= 1
