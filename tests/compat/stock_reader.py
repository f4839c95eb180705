"""Load checkpoints with stock PyTorch where tierckpt cannot be imported; exit 0 if every bit of each is as expected.

python -I stock_reader.py EXPECTED.pt URI...
"""

import importlib.abc
import sys
from pathlib import Path


class NoTierckpt(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == "tierckpt":
            raise ModuleNotFoundError(f"{fullname} is not installed here")


def main(expected_path: str, *uris: str) -> int:
    import torch
    import torch.distributed.checkpoint as dcp
    from everything import blank, differences
    from extensions import registry
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    expected = torch.load(expected_path, weights_only=False)
    wrong = []
    for uri in uris:
        reader = FsspecReader(uri) if "://" in uri else dcp.FileSystemReader(uri, _extension_registry=registry())
        state = blank(expected)
        dcp.load(state, storage_reader=reader, no_dist=True)
        wrong += [f"{uri}: {name}" for name in differences(state, expected)]
    print("differs:" if wrong else "equal", wrong)
    return 1 if wrong or not uris else 0


if __name__ == "__main__":
    sys.meta_path.insert(0, NoTierckpt())
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        import tierckpt
    except ModuleNotFoundError:
        pass
    else:
        sys.exit(f"tierckpt can be imported here: {tierckpt.__file__}")
    code = main(*sys.argv[1:])
    if any(name.partition(".")[0] == "tierckpt" for name in sys.modules):
        sys.exit("the checkpoint made PyTorch import tierckpt")
    sys.exit(code)
