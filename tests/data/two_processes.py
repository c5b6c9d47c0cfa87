"""One of two processes of `test_to_device.py`; prints what it has seen as JSON."""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 2)


def main(port: str, process: int) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    from jaxaccel.data import ArrayStore, BatchPlan, DeviceDataset, Loader, to_device

    # Of random bytes, so that a wrong row cannot pass for the right one.
    image = np.random.default_rng(0).integers(0, 256, (24, 3), dtype=np.uint8)
    store = ArrayStore({"image": image, "label": np.arange(24, dtype=np.uint8)})
    plan = BatchPlan(24, 8, epochs=1, process_index=process, process_count=2)
    mesh = jax.make_mesh((4,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    @jax.jit
    def checksum(batch):
        weight = jnp.arange(8, dtype=jnp.int32)[:, None] + 1
        return (batch["image"].astype(jnp.int32) * weight).sum()

    seen: dict[str, Any] = {"shapes": [], "local": [], "sums": []}
    with to_device(Loader(store, plan), sharding=sharding) as batches:
        for batch in batches:
            seen["shapes"].append(list(batch["label"].shape))
            shards = sorted(
                batch["label"].addressable_shards, key=lambda s: s.index[0].start
            )
            seen["local"].append(np.concatenate([s.data for s in shards]).tolist())
            seen["sums"].append(int(checksum(batch)))
    dataset = DeviceDataset(store, sharding=sharding)
    seen["held"] = sum(
        s.data.nbytes for s in dataset.columns["image"].addressable_shards
    )
    with dataset.batches(plan, sharding=sharding) as batches:
        seen["resident"] = [int(checksum(batch)) for batch in batches]
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
