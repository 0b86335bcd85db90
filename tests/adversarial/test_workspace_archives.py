"""Hostile archives given to a workspace: each is refused with its reason, and changes nothing inside or outside."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_program.errors import Overloaded, PlatformError
from agent_program.ids import DEFAULT_TENANT, ProgramId
from support.archives import files, listed, member, tar, zipped
from support.scripted_sandboxes import ScriptedLauncher, scripted_actor
from support.tools import Program, state_directory
from tool_runtime.actor import ToolActor
from tool_runtime.config import MIB, SandboxLimits
from tool_runtime.tar_reader import EntryKind, TarEntry, TarLimits
from tool_runtime.unpacking import unpack
from tool_runtime.workspace_errors import (
    ArchiveRefused,
    SnapshotNotFound,
    UploadNotFound,
    WorkspaceBusy,
    WorkspaceNotFound,
    WorkspaceTooLarge,
)
from tool_runtime.workspace_transfers import WorkspaceTransfers

pytestmark = pytest.mark.adversarial

LIMITS = SandboxLimits(workspace_bytes_max=2 * MIB, workspace_files_max=100)
OUTSIDE = "stays"


@pytest.fixture
def state() -> Iterator[Path]:
    with state_directory() as path:
        (path / "outside").write_text(OUTSIDE)
        yield path


@pytest.fixture
def actor(state: Path) -> ToolActor:
    actor = scripted_actor(state, ScriptedLauncher(), limits=LIMITS, warm_sandboxes=0)
    assert actor._sandboxes is not None
    actor._transfers = WorkspaceTransfers(actor._settings, actor._sandboxes._workspaces, actor._sandboxes, actor._clock)
    return actor


@pytest.fixture
def program() -> ProgramId:
    return ProgramId("p")


def workspace(actor: ToolActor, program: ProgramId) -> Path:
    assert actor._sandboxes is not None
    return actor._sandboxes._workspaces.path(DEFAULT_TENANT, program)


def everything_below(root: Path) -> set[str]:
    return {
        os.path.relpath(os.path.join(where, name), root)
        for where, directories, names in os.walk(root)
        for name in (*directories, *names)
    }


def device(kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    return member("dev", type=kind, devmajor=1, devminor=3)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=kind, linkname=target)


def huge_extension() -> bytes:
    """A pax header that says it is a gigabyte; and is, where nobody counts."""
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, 2**30
    return header.tobuf(tarfile.USTAR_FORMAT) + bytes(4096)


def negative_size() -> bytes:
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = b"\xff" * 11 + b"\xf0"
    header[148:156] = b" " * 8
    checksum = sum(header)
    header[148:156] = b"%06o\0 " % checksum
    return bytes(header) + bytes(1024)


def pax_size(claimed: str) -> bytes:
    return tar(member("x", b"abc", pax_headers={"size": claimed}))


REFUSED = {
    "an absolute path": (tar(member("/etc/cron.d/x", b"x")), "absolute path"),
    "an absolute path after a longer name": (tar(member("/" + "a/" * 60 + "x", b"x")), "absolute path"),
    "a path up": (tar(member("../outside", b"x")), "leads out"),
    "a path up in the middle": (tar(member("a/../../outside", b"x")), "leads out"),
    "a path up in a long name": (tar(member("../" + "a" * 200, b"x")), "leads out"),
    "a path up in a gnu long name": (tar(member("../" + "a" * 200, b"x"), tar_format=tarfile.GNU_FORMAT), "leads out"),
    "a directory up": (tar(member("..", type=tarfile.DIRTYPE)), "leads out"),
    "an absolute link": (tar(link("l", "/etc/passwd")), "link out of the workspace"),
    "a link up": (tar(link("l", "../outside")), "link out of the workspace"),
    "a link up from below": (tar(link("a/l", "../../outside")), "link out of the workspace"),
    "a link that other links turn outwards": (
        tar(link("x", "."), link("l", "x/x/../../outside")),
        "link out of the workspace",
    ),
    "a link to nothing": (tar(link("l", "")), "link to nowhere"),
    "a link, then a file through it": (
        tar(link("l", "d"), member("d/x", b"x"), member("l/x", b"x")),
        "not a directory",
    ),
    "a link, then a file in its place": (tar(link("l", "x"), member("l", b"x")), "twice"),
    "a link, then a directory in its place": (tar(link("l", "d"), member("l", type=tarfile.DIRTYPE)), "twice"),
    "a directory, then a link in its place": (tar(member("d/x", b"x"), link("d", "e")), "twice"),
    "a file, then a file below it": (tar(member("f", b"x"), member("f/x", b"x")), "not a directory"),
    "a hard link out": (tar(link("l", "../outside", tarfile.LNKTYPE)), "leads out"),
    "an absolute hard link": (tar(link("l", "/etc/passwd", tarfile.LNKTYPE)), "absolute path"),
    "a hard link to what is not there": (tar(link("l", "x", tarfile.LNKTYPE)), "not a file before it"),
    "a hard link to a link": (tar(link("s", "x"), link("l", "s", tarfile.LNKTYPE)), "not a file before it"),
    "a character device": (tar(device(tarfile.CHRTYPE)), "is a device"),
    "a block device": (tar(device(tarfile.BLKTYPE)), "is a device"),
    "a fifo": (tar(member("f", type=tarfile.FIFOTYPE)), "is a fifo"),
    "a kind nobody knows": (tar(member("f", type=b"Z")), "of kind b'Z'"),
    "a sparse file": (tar(member("f", type=tarfile.GNUTYPE_SPARSE)), "sparse"),
    "a sparse file of the newer form": (
        tar(member("f", b"x", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.realsize": "9" * 12})),
        "sparse",
    ),
    "set-user-ID": (tar(member("f", b"x", mode=0o4755)), "would run as somebody else"),
    "set-group-ID of a directory": (tar(member("d", type=tarfile.DIRTYPE, mode=0o2755)), "would run as somebody else"),
    "a name twice": (tar(member("f", b"1"), member("f", b"2")), "twice"),
    "a name twice, spelled differently": (tar(member("a/f", b"1"), member("./a//f", b"2")), "twice"),
    "the workspace as a file": (tar(member(".", b"x")), "names the workspace"),
    "a directory deeper than anything": (tar(member("d/" * 300 + "f", b"x")), "nested too deeply"),
    "a name longer than any": (tar(member("n" * 300, b"x")), "too long"),
    "a path longer than any": (tar(member("/".join(["n" * 200] * 30), b"x")), "no name"),
    "a size below zero": (negative_size(), "below zero"),
    "a size that is no number": (pax_size("-1"), "with the size"),
    "a pax header of a gigabyte": (huge_extension(), "extended header of"),
    "no archive at all": (b"PK\x03\x04" + bytes(2000), "not a tar"),
    "text": (b"#!/bin/sh\nrm -rf /\n" * 100, "not a tar"),
    "half an archive": (files({"f": b"x" * 5000})[:3000], "ends in the middle"),
    "half a header": (files({"f": b"x"})[:300], "ends in the middle"),
    "damaged compression": (zipped(files({"f": os.urandom(5000)}))[:20] + b"\xff" * 3000, "damaged"),
    "half of a compressed archive": (zipped(files({"f": os.urandom(5000)}))[:2000], "ends in the middle"),
}
TOO_LARGE = {
    "too many bytes in one file": files({"f": bytes(3 * MIB)}),
    "too many bytes in many files": files({f"f{n}": bytes(300_000) for n in range(9)}),
    "too many files": files({f"f{n}": b"" for n in range(101)}),
    "too many directories that only names make": files({f"d{n}/e{n}/f": b"" for n in range(40)}),
    "a compressed bomb": zipped(files({"f": bytes(64 * MIB)})),
    "a bomb in what belongs to no file": zipped(
        tar(*(member(f"f{n}", pax_headers={"comment": "x" * 60_000}) for n in range(50)))
    ),
    "a file that says it is huge": tar(member("x", b"abc", pax_headers={"size": str(10**12)})),
}


@pytest.mark.parametrize(("archive", "why"), REFUSED.values(), ids=REFUSED)
async def test_a_hostile_archive_is_refused_and_changes_nothing(
    actor: ToolActor, program: ProgramId, state: Path, archive: bytes, why: str
) -> None:
    await actor.import_workspace(program, files({"kept": "as it was"}))
    before = everything_below(state)
    with pytest.raises(ArchiveRefused, match=why):
        await actor.import_workspace(program, archive)
    assert everything_below(state) == before
    assert (workspace(actor, program) / "kept").read_text() == "as it was"
    assert (state / "outside").read_text() == OUTSIDE


@pytest.mark.parametrize("archive", TOO_LARGE.values(), ids=TOO_LARGE)
async def test_an_archive_that_is_too_large_is_refused_and_changes_nothing(
    actor: ToolActor, program: ProgramId, state: Path, archive: bytes
) -> None:
    await actor.import_workspace(program, files({"kept": "as it was"}))
    before = everything_below(state)
    with pytest.raises(WorkspaceTooLarge):
        await actor.import_workspace(program, archive)
    assert everything_below(state) == before


VALID = tar(
    member("d", type=tarfile.DIRTYPE),
    member("d/f", b"content" * 100, mode=0o755),
    link("d/l", "f"),
    link("h", "d/f", tarfile.LNKTYPE),
    member("long/" + "n" * 150, b"x", pax_headers={"comment": "y" * 300}),
)


@given(
    at=st.integers(0, len(VALID) - 1),
    bytes_there=st.binary(min_size=1, max_size=40),
    end=st.one_of(st.none(), st.integers(0, len(VALID))),
    mends_checksums=st.booleans(),
    compresses=st.booleans(),
)
def test_whatever_an_archive_says_it_is_unpacked_or_refused_and_stays_inside(
    at: int, bytes_there: bytes, end: int | None, mends_checksums: bool, compresses: bool
) -> None:
    damaged = bytearray((VALID[:at] + bytes_there + VALID[at + len(bytes_there) :])[:end])
    if mends_checksums:  # otherwise most of it would be found by its checksum
        header = damaged[at - at % 512 : at - at % 512 + 512]
        if len(header) == 512:
            header[148:156] = b" " * 8
            damaged[at - at % 512 + 148 : at - at % 512 + 156] = b"%06o\0 " % sum(header)
    source = io.BytesIO(zipped(bytes(damaged)) if compresses else bytes(damaged))
    with tempfile.TemporaryDirectory() as place:
        root = Path(place, "root")
        root.mkdir()
        with suppress(ArchiveRefused, WorkspaceTooLarge):
            unpack(source.read, root, TarLimits(bytes_max=10_000, entries_max=20), uid=None)
        assert [path.name for path in Path(place).iterdir()] == ["root"]
        for path in root.rglob("*"):
            state = path.lstat()
            assert stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode) or stat.S_ISLNK(state.st_mode)
            assert not state.st_mode & 0o6000
            assert path.resolve().is_relative_to(root.resolve())


@pytest.mark.parametrize("compress", [bytes, zipped])
async def test_an_archive_with_owners_modes_links_and_odd_names_becomes_the_workspace(
    actor: ToolActor, program: ProgramId, compress: type[bytes]
) -> None:
    odd = "new\nline \udcff é " + "l" * 150
    archive = tar(
        member(".", type=tarfile.DIRTYPE, mode=0o755),
        member("d", type=tarfile.DIRTYPE, mode=0o500, mtime=1_000_000_000),
        member("d/run", b"#!/bin/sh\n", mode=0o755, mtime=1_000_000_001, uid=0, gid=0, uname="root", gname="root"),
        link("d/same", "d/run", tarfile.LNKTYPE),
        link("d/to", "../" + "x"),
        link("inside", "d/run"),
        member(odd, b"odd"),
        member("empty"),
    )
    content = await actor.import_workspace(program, compress(archive))
    root = workspace(actor, program)
    assert (content.entries, content.bytes) == (8, 13)
    assert everything_below(root) == {"d", "d/run", "d/same", "d/to", "inside", odd, "empty"}
    run = (root / "d/run").stat()
    assert (run.st_mode & 0o7777, run.st_mtime, run.st_nlink) == (0o755, 1_000_000_001, 2)
    assert ((root / "d").stat().st_mode & 0o7777, (root / "d").stat().st_mtime) == (0o700, 1_000_000_000)
    owner = root.stat().st_uid
    assert all(path.lstat().st_uid == owner for path in root.rglob("*"))
    assert owner != 0 or os.geteuid() != 0
    assert root.stat().st_mode & 0o7777 == 0o700


async def test_what_is_exported_can_be_imported_again(actor: ToolActor, program: ProgramId) -> None:
    await actor.import_workspace(program, files({"a/b/c": "deep", "a/d": b"\0" * 100_000, "e": ""}))
    os.mkfifo(workspace(actor, program) / "fifo")
    exported = b"".join([piece async for piece in actor.export_workspace(program)])
    assert {name: info.size for name, info in listed(exported).items() if info.isfile()} == {
        "a/b/c": 4,
        "a/d": 100_000,
        "e": 0,
    }
    assert all((info.uid, info.gid, info.uname) == (0, 0, "") for info in listed(exported).values())
    other = ProgramId("other")
    await actor.import_workspace(other, pieces_of(exported))
    assert everything_below(workspace(actor, other)) == everything_below(workspace(actor, program)) - {"fifo"}


async def pieces_of(archive: bytes) -> AsyncIterator[bytes]:
    source = io.BytesIO(archive)
    while piece := source.read(1000):
        yield piece


async def test_an_export_follows_no_link_and_is_bounded(actor: ToolActor, program: ProgramId, state: Path) -> None:
    await actor.import_workspace(program, files({"f": "own"}))
    root = workspace(actor, program)
    (root / "out").symlink_to(state / "outside")
    (root / "dir").symlink_to("/etc")
    exported = b"".join([piece async for piece in actor.export_workspace(program)])
    assert OUTSIDE.encode() not in exported
    assert {name: info.type for name, info in listed(exported).items()} == {
        "dir": tarfile.SYMTYPE,
        "f": tarfile.REGTYPE,
        "out": tarfile.SYMTYPE,
    }
    with (root / "sparse").open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(WorkspaceTooLarge, match="sparse"):
        async for _ in actor.export_workspace(program):
            pass


async def test_an_export_of_nothing_is_not_found_before_it_begins(actor: ToolActor, program: ProgramId) -> None:
    with pytest.raises(WorkspaceNotFound):
        await anext(actor.export_workspace(program))


async def test_a_snapshot_brings_back_what_was_links_out_included(actor: ToolActor, program: ProgramId) -> None:
    await actor.import_workspace(program, files({"f": "before"}))
    root = workspace(actor, program)
    (root / "python").symlink_to("/usr/bin/python3")
    snapshot = await actor.snapshot_workspace(program)
    (root / "f").write_text("after")
    (root / "new").touch()
    await actor.restore_workspace(program, snapshot)
    assert (root / "f").read_text() == "before"
    assert os.readlink(root / "python") == "/usr/bin/python3"
    assert not (root / "new").exists()


async def test_snapshots_are_few_ones_own_and_go_with_the_workspace(
    actor: ToolActor, program: ProgramId, state: Path
) -> None:
    await actor.import_workspace(program, files({"f": "x"}))
    kept = [await actor.snapshot_workspace(program) for _ in range(actor._settings.workspace_snapshots_max + 1)]
    with pytest.raises(SnapshotNotFound):
        await actor.restore_workspace(program, kept[0])
    for strange in ("../" + kept[1], "x", kept[1].upper() + " ", ""):
        with pytest.raises(SnapshotNotFound):
            await actor.restore_workspace(program, strange)
    await actor.import_workspace(ProgramId("other"), files({"f": "x"}))
    with pytest.raises(SnapshotNotFound):
        await actor.restore_workspace(ProgramId("other"), kept[1])
    await actor.release(program, delete_workspace=True)
    assert len(everything_below(state / "snapshots")) == 0
    with pytest.raises(SnapshotNotFound):
        await actor.restore_workspace(program, kept[1])


async def test_nothing_is_replaced_under_a_call(actor: ToolActor) -> None:
    program = Program(actor)
    running = await program.shell_running("hang", timeout_s=30)
    for attempt in (
        actor.import_workspace(program.id, files({"f": "x"})),
        actor.snapshot_workspace(program.id),
    ):
        with pytest.raises(WorkspaceBusy):
            await attempt
    await actor.cancel(program.id)
    await running
    await actor.import_workspace(program.id, files({"f": "x"}))
    assert actor._sandboxes is not None
    assert actor._sandboxes.live == 0, "its processes would go on in files that are gone"
    await actor.close()


async def test_uploads_are_few_ones_own_bounded_and_given_up(actor: ToolActor, program: ProgramId, state: Path) -> None:
    assert actor._transfers is not None
    upload = await actor.begin_import(program)
    with pytest.raises(UploadNotFound):
        await actor.append_import(ProgramId("other"), upload, b"x")
    assert await actor.append_import(program, upload, b"x" * 1000) == 1000
    with pytest.raises(WorkspaceTooLarge):
        await actor.append_import(program, upload, bytes(4 * MIB))
    with pytest.raises(UploadNotFound):
        await actor.commit_import(program, upload)
    more = [await actor.begin_import(program) for _ in range(16)]
    with pytest.raises(Overloaded):
        await actor.begin_import(program)
    for one in more:
        actor._transfers._uploads[one].touched_s -= 61.0
    await actor._transfers.drop_stalled()
    with pytest.raises(UploadNotFound):
        await actor.append_import(program, more[0], b"x")
    assert everything_below(state / "uploads") == set()


async def test_what_the_reader_lets_through_the_maker_still_stops(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two walls: with the first one gone, nothing is made outside of the directory either."""
    root = state / "root"
    root.mkdir()
    entries = [
        TarEntry(kind=EntryKind.SYMLINK, path=(b"l",), mode=0o777, mtime_s=0, size=0, target=os.fsencode(state)),
        TarEntry(kind=EntryKind.FILE, path=(b"l", b"planted"), mode=0o644, mtime_s=0, size=0),
    ]
    monkeypatch.setattr("tool_runtime.unpacking.entries_of", lambda *_: iter([(entry, iter(())) for entry in entries]))
    with pytest.raises(ArchiveRefused):
        unpack(lambda _: b"", root, TarLimits(bytes_max=1, entries_max=1), uid=None)
    assert not (state / "planted").exists()


def test_every_refusal_says_what_a_client_can_act_on() -> None:
    for error in (
        ArchiveRefused,
        WorkspaceTooLarge,
        WorkspaceBusy,
        WorkspaceNotFound,
        SnapshotNotFound,
        UploadNotFound,
    ):
        assert issubclass(error, PlatformError)
        assert 400 <= error.status < 500
