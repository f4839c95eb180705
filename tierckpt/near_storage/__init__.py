"""An optimizer whose state is in files on the SSD and is stepped by a separate process.

``blocks`` defines the layout, ``state_file`` holds two versions of each block, ``gradient_files`` logs the steps.
``updater`` is the process, ``updater_process`` the trainer's end of it, ``optimizer`` the public class.

    <directory>/lock                     held by the process; contains the trainer's process id
    <directory>/current.json             names the current state and describes its layout
    <directory>/<token>/state            two versions of each block, mapped
    <directory>/<token>/records          step and digest of both versions of each block
    <directory>/<token>/*.gradients      the gradient log, as frames (``save.log_segments``)

Invariants (a block is a run of parameters with all their state; a step is a number that rises by one):
    N1  A version of a block is valid when its record is whole and the digest in it matches. Records are written after
        the block's bytes are on the disk (msync), and never for the version that steps are being applied to.
    N2  Steps are applied in place to the version that is not current. So a crash at any instruction of an update, a
        torn page included, leaves the current version and its record intact.
    N3  A block is recorded at a step only when the frames up to that step are on the disk (fdatasync). A file of
        frames is removed only when every block is recorded at its last step or later. So each block, in either valid
        version, can be replayed to the newest step of the log, and all blocks reach the same step.
    After a block is recorded, its previous version is kept until the next step begins: by then every rank of a job has
        finished this step. So a rank can go back to the newest step that all ranks have (``resume(last_step)``).
    N4  The trainer's gradients of a step stay in shared memory until the frame is in its file. If the process dies
        before that, its successor receives them again; after that, it reads them from the file. Parameters come back
        in the same memory afterwards.
    N5  A state is created or replaced under a new token. ``current.json`` names it when all of it is on the disk.
    N6  A disk read error raises SIGBUS in a process that reads a mapping. The trainer maps files only to locate the
        tensors to save, and to fill a new state, which needs no reads from the disk. It reads with pread, which
        returns an error. The updater reads its mapping: it dies, and ``UpdaterProcess`` reports the cause.
    N7  Bytes of a block are compared with the digest taken when they were written: before each step (with the digest
        of the previous step, in the process), before a version is copied over the other, and when a save has read the
        current version. On a mismatch the process ends without changing anything; its successor starts from the
        version that matches its record, and replays the later steps from the frames, which are checked too.

Sources: SK hynix's checkpoint-offloading SSD (the optimizer's state at the storage); Smart-Infinity (updates there).
"""
