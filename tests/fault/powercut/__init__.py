"""Power cuts: a virtual machine that saves and drains without a pause, and whose power goes at a random moment.

    python -m tests.fault.powercut --cuts 100 --file-systems ext4,xfs [--replays 5] [--bug all] [--seed N] [--jobs 1]

Needs root (loop mounts) and four Debian packages: ``qemu-system-x86``, ``busybox-static``, ``e2fsprogs``, ``xfsprogs``.
The guest's kernel is another, ``linux-image-cloud-amd64``; it is unpacked and never installed. Processors are emulated
(``tcg``), so that it runs where virtual machines cannot be nested.

What is cut. The guest saves with the functions of ``tierckpt`` that the writer calls (``tests/fault/sweep/saver.py``),
one rank or two, with and without collectives, drained by links and by copies, overwriting, pruning; on ext4 or xfs, on
a disk of its own. Before and after each thing it says so twice: over a serial line, and in a few blocks behind the file
system. It is booted once for each file system and frozen (a migration to a file) when it has saved a first checkpoint;
each cut thaws it on a fresh copy of the disk, lets it run for a random time, and ends QEMU by SIGKILL.

What a cut is, in two strengths.

    kill     The guest's memory is gone, page cache included. The disk has every write that was handed to it: a disk
             whose cache is not volatile.
    replay   The disk's own cache is gone too. QEMU writes a log of all writes and flushes (``blklogwrites``); from a
             random point of it the disk is built again with what was flushed, and of what was written after the last
             flush nothing, all, some writes, or some blocks. One kill gives many replays.

What is judged, on the host, by loop mount (the journal is replayed) and in a process of its own: each checkpoint that
was acknowledged is committed and equal byte for byte; nothing torn is listed as committed, on either tier, by us or by
stock metadata; ``latest``, ``list``, ``verify`` with data and ``restore`` work; ``recover`` works, drains the rest, and
leaves all that in place; then a new save works.

What keeps the harness honest. Seeded bugs must be found (``--bug all``); cuts that met the guest between two saves are
not counted, nor those from which nothing came over the serial line; a run with fewer cuts than planned fails. What the
serial line said must be in the blocks behind the file system too.

What it cannot show: disks that lie about a flush, and tearing below a block of 4096 bytes, which is the sector size of
this disk. A write that was completed while a flush was under way is taken to be flushed.

events     what the guest says, and what that allows (pure)
writelog   the log of writes and flushes; builds the disk after a cut (pure but for files)
guest      what runs in the machine
bugs       what may be wrong with it
initrd     the kernel and the file system it starts from
machine    QEMU: boot, freeze, thaw, cut
judge      what must hold on a disk after a cut
campaign   many cuts, and the figures
"""
