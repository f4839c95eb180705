"""Power cuts: a virtual machine saves and drains without a pause and is killed at a random moment.

    python -m tests.fault.powercut --cuts 100 --file-systems ext4,xfs [--replays 5] [--bug all] [--seed N] [--jobs 1]

Needs root (loop mounts) and the Debian packages ``qemu-system-x86``, ``busybox-static``, ``e2fsprogs``, ``xfsprogs``.
The guest's kernel, ``linux-image-cloud-amd64``, is unpacked, not installed. QEMU emulates the processor (``tcg``), so
nested virtualisation is not needed.

The guest saves with the functions of ``tierckpt`` that the writer calls (``tests/fault/sweep/saver.py``): one rank or
two, with and without collectives, drained by links and by copies, overwriting, pruning; on ext4 or xfs, on a disk of
its own. Before and after each action it records an event twice: on a serial line, and in blocks after the file system.
It is booted once for each file system and frozen (a migration to a file) after its first checkpoint; each cut thaws it
on a fresh copy of the disk, lets it run for a random time, and sends SIGKILL to QEMU.

Two strengths of a cut:

    kill     The guest's memory is lost, page cache included. Every write handed to the disk is durable: a disk
             without a volatile cache.
    replay   The disk's cache is lost too. QEMU logs all writes and flushes (``blklogwrites``); the disk is rebuilt from
             a random point of the log: all flushed writes, and of the later ones none, all, some writes, or some
             blocks. One kill gives many replays.

Checks, on the host, by loop mount (the journal is replayed), in a separate process: each acknowledged checkpoint is
committed and equal byte for byte; no torn one is listed as committed on either tier, in tierckpt's or stock metadata;
``latest``, ``list``, ``verify`` with data and ``restore`` work; ``recover`` works, drains the rest, and keeps all
this; then a new save works.

Controls: seeded bugs must be found (``--bug all``); cuts between two saves, and those without an event on the serial
line, do not count; a run with fewer cuts than planned fails; every event of the serial line must also be on the disk.

Not covered: disks that lie about a flush; writes torn within a sector of 4096 bytes. A write that completes during a
flush counts as flushed.

events     the guest's events, and the disk states that they allow (pure)
writelog   the log of writes and flushes; builds the disk after a cut (pure but for files)
guest      the program in the machine
bugs       seeded bugs of the guest
initrd     kernel and initial file system
machine    QEMU: boot, freeze, thaw, cut
judge      the checks of a disk after a cut
campaign   many cuts, and their figures
"""
