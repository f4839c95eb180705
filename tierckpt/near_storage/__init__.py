"""An optimizer whose state is in files on the SSD and is stepped by a separate process.

    <directory>/lock                     held by the process; contains the trainer's process id
    <directory>/current.json             names the current state and describes its layout
    <directory>/<token>/state            two versions of each block, mapped
    <directory>/<token>/records          step and digest of both versions of each block
    <directory>/<token>/*.gradients      the gradient log, as frames (``save.log_segments``)

Invariants (a block is a run of parameters with all their state):
    N1  A version of a block is valid when its record is whole and the digest matches. A record is written after the
        block's msync, and never for the version that steps are applied to.
    N2  Steps are applied in place to the version that is not current: a crash or a torn page leaves the current one.
    N3  A block is recorded at a step only when the frames up to that step are on the disk. A file of frames is removed
        only when every block is recorded at the file's last step or later. So each valid version can be replayed to the
        newest step.
        The previous version of a block is kept until the next step begins, when every rank has finished this step: so
        a rank can go back to the newest step of all ranks (``resume(last_step)``).
    N4  The trainer's gradients of a step stay in shared memory until the frame is in its file, for a new process.
    N5  A state is created under a new token. ``current.json`` names it when all of it is on the disk.
    N6  A disk read error raises SIGBUS in a process that reads a mapping. So the trainer reads with pread, and the
        updater, which reads its mapping, dies: ``UpdaterProcess`` reports the cause.
    N7  A block is compared with its digest before each step and copy, and when a save has read it. On a mismatch the
        process ends without changes; its successor replays from the valid version.
"""
