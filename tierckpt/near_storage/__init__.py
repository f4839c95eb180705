"""An optimizer whose state lies in files on the SSD, stepped by a process of its own from the gradients it is sent.

``blocks`` says where each tensor lies, ``state_file`` has the two versions of each block, ``gradient_files`` the steps
behind them. ``updater`` is the process, ``updater_process`` the trainer's end of it, ``optimizer`` what people use.

    <directory>/lock                     held by the process; the trainer it works for
    <directory>/current.json             the state that counts, and what it is made of
    <directory>/<token>/state            two versions of each block, mapped
    <directory>/<token>/records          of both versions of each block: step and digest
    <directory>/<token>/*.gradients      the frames behind them, a gradient log (``save.log_segments``)

Invariants (a block is a run of parameters with all that belongs to them; a step is a number that rises by one):
    N1  A version of a block counts when its record is whole and the digest in it fits. Records are written after the
        block's bytes are on the disk (msync), and never while the block is the one that steps are applied to.
    N2  Steps are applied to the version that does not count, in place. So a crash at any instruction of an update, a
        torn page included, leaves the other version as it was, with its record.
    N3  A block is recorded at a step only when the frames up to that step are on the disk (fdatasync), and a file of
        frames goes only when every block is recorded at its last step or later. So each block, whichever version of it
        counts, can be brought to the newest step of the log: all blocks are at one step again.
        At a step, the version before is left alone until the next step begins: by then every rank of a job has made
        this one. So a rank can go back to the newest step that all of them have (``resume(last_step)``).
    N4  The trainer's gradients of a step stay in shared memory until the frame is in its file: a process that dies
        before is given them again, one that dies after has them. Parameters come back in the same memory after that.
    N5  A state is begun, or replaced, under a new token: ``current.json`` names it when all of it is on the disk.
    N6  A disk that cannot be read is SIGBUS in a process that reads a mapping. The trainer maps files to say where what
        is saved lies, and to fill a new state, of which the disk has nothing to give back: it reads with pread, which
        fails. The process reads its mapping: it ends, and the trainer is told why (``UpdaterProcess``).
    N7  Bytes of a block are compared with the digest that they had when they were written: before each step of it (the
        digest of the step before, in the process), before a version is copied over the other, and when a save has read
        the version that counts. Where they differ the process ends, having changed nothing; the next one begins at the
        version whose digest fits its record, and makes the steps since from the frames, which are checked as well.

Sources: SK hynix's checkpoint-offloading SSD (the optimizer's state at the storage); Smart-Infinity (updates there).
"""
