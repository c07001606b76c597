"""Records that stay in the memory of JAX's devices, which divide them as they divide a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpucache.errors import UsageError
from tpucache.loading.loader import CachedLoader
from tpucache.native import Array
from tpucache.ondevice.resident import (
    XLA_TILE,
    DeviceFullError,
    RecordSlots,
    Residence,
    Resident,
    table_bytes,
)
from tpucache.ondevice.settings import ResidentChoice


class JaxMemory:
    """Stores tables of records in the memory of a sharding's devices.

    The mesh axis that divides batches also divides the rows of a table. Devices along other axes have copies.
    """

    tile = XLA_TILE

    def __init__(self, sharding: jax.sharding.Sharding) -> None:
        """Store `sharding`, which divides the first axis of a batch over devices of this process."""
        self.sharding = of_first_axis(sharding)
        if problem := _problem(self.sharding):
            raise UsageError(f'{problem}: give another sharding than {sharding}, or use resident="no"')
        count = len(self.sharding.device_set)
        self.cores = len({*map(str, self.sharding.devices_indices_map((count,)).values())})

    def put(self, array: Any, name: str = "rows") -> jax.Array:
        # JAX keeps the array, and so the pooled buffer, until it has copied it.
        return jax.device_put(to_jax_dtype(name, np.asarray(array)), self.sharding)

    def put_all(self, arrays: Sequence[Array]) -> list[jax.Array]:
        sent: list[jax.Array] = jax.device_put([*arrays], self.sharding)
        return sent

    def reserve(self, slots: RecordSlots, chunk: jax.Array) -> JaxTable:
        layout = self.sharding, self.cores, slots.rows_a_core, slots.is_local
        return JaxTable(TableForm(*layout, chunk.shape[1:], chunk.dtype))

    def itemsize(self, dtype: np.dtype[Any]) -> int:
        return int(jax.dtypes.canonicalize_dtype(dtype).itemsize)

    def free_bytes(self) -> int | None:
        """Return the most bytes that a table may have, so that its parts fit into the devices' free memory.

        This is the least free memory of any device, times the number of parts into which batches are divided.
        """
        found = [device.memory_stats() for device in self.sharding.device_set]
        if not all(each and "bytes_limit" in each and "bytes_in_use" in each for each in found):
            return None
        return self.cores * min(int(each["bytes_limit"]) - int(each["bytes_in_use"]) for each in found)


class JaxTable:
    """A table on the devices with one row for each record. The bits of a row are stored as unsigned integers."""

    def __init__(self, form: TableForm) -> None:
        """Reserve memory for the rows of a table with the layout `form`."""
        self.form = form
        try:
            self.rows: jax.Array = jax.jit(form.zeros, out_shardings=form.sharding)()
            self.rows.block_until_ready()
        except RuntimeError as error:
            table = jax.eval_shape(form.zeros)
            size = table.size * table.dtype.itemsize
            raise DeviceFullError(
                f"{size / 1e9:,.2f} GB of records do not fit into the memory of {form.cores} device(s): use "
                f'resident="no" ({str(error).splitlines()[0]})'
            ) from error

    def write(self, number: jax.Array, chunk: jax.Array) -> None:
        self.rows = self.form.written(self.rows, number, chunk)

    def take(self, slots: jax.Array) -> jax.Array:
        return self.form.taken(self.rows, slots)


@dataclass(frozen=True)
class TableForm:
    """The layout of a table on the devices. Tables with equal forms share their compiled functions.

    A table has `cores` parts of `rows_a_core` rows, for records of this `shape` and `dtype`. With `is_local`, each core
    needs only rows of its own part; otherwise the cores exchange rows.
    """

    sharding: jax.sharding.Sharding
    cores: int
    rows_a_core: int
    is_local: bool
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def _values(self) -> int:
        return int(np.prod(self.shape))

    @property
    def _bits(self) -> np.dtype[Any]:
        return np.dtype(f"u{self.dtype.itemsize}")

    @property
    def _row(self) -> tuple[int, ...]:
        return () if self._values == 1 else (XLA_TILE.padded(self._values),)

    def zeros(self) -> jax.Array:
        return jnp.zeros((self.cores * self.rows_a_core, *self._row), self._bits)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def written(self, rows: jax.Array, number: jax.Array, chunk: jax.Array) -> jax.Array:
        bits = chunk.astype(self._bits) if self.dtype == bool else jax.lax.bitcast_convert_type(chunk, self._bits)
        bits = bits.reshape(len(chunk), self._values)
        padding = XLA_TILE.padded(self._values) - self._values
        bits = jnp.pad(bits, ((0, 0), (0, padding))).reshape(len(chunk), *self._row)

        def write(own: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(own, new, at[0] * len(new), 0)

        return jax.lax.with_sharding_constraint(self._on_each(write)(rows, number, bits), self.sharding)

    @functools.partial(jax.jit, static_argnums=0)
    def taken(self, rows: jax.Array, slots: jax.Array) -> jax.Array:
        """Return the rows with the numbers `slots`, in the shape and dtype of the records.

        A number after the last row gives zeros, unless each of several cores takes only its own rows.
        """

        def take_own(own: jax.Array, wanted: jax.Array) -> jax.Array:
            places = wanted % self.rows_a_core if self.cores > 1 else wanted
            return own.at[places].get(mode="fill", fill_value=0)

        def take_any(own: jax.Array, wanted: jax.Array) -> jax.Array:
            """Return the rows that this core needs, as sums over all cores: a core without the row adds 0."""
            axes = self.sharding.spec[0]
            everybodys = jax.lax.all_gather(wanted, axes, tiled=True)
            is_own = everybodys // self.rows_a_core == jax.lax.axis_index(axes)
            places = jnp.where(is_own, everybodys % self.rows_a_core, self.rows_a_core)
            found = own.at[places].get(mode="fill", fill_value=0)
            return jax.lax.psum_scatter(found, axes, scatter_dimension=0, tiled=True)

        is_own = self.is_local or self.cores == 1
        bits = self._on_each(take_own if is_own else take_any)(rows, slots)
        values = (bits[:, : self._values] if self._row else bits).reshape(-1, *self.shape)
        found = values != 0 if self.dtype == bool else jax.lax.bitcast_convert_type(values, self.dtype)
        return jax.lax.with_sharding_constraint(found, self.sharding)

    def _on_each(self, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        if self.cores == 1:
            return function
        spec = self.sharding.spec
        layout: Any = {"mesh": self.sharding.mesh, "in_specs": spec, "out_specs": spec}
        mapped: Callable[..., jax.Array]
        if hasattr(jax, "shard_map"):
            mapped = jax.shard_map(function, **layout, check_vma=False)
        else:
            from jax.experimental.shard_map import shard_map  # JAX before 0.6

            mapped = shard_map(function, **layout, check_rep=False)
        return mapped


def of_first_axis(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding:
    """Return a sharding for arrays of any rank, which divides the first axis as `sharding` does; None: over all
    devices.
    """
    if sharding is None:
        # The axes of a Mesh are automatic. With the explicit axes of jax.make_mesh, gathers in a loss raise.
        return NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    if not isinstance(sharding, NamedSharding):
        return sharding
    if any(axis is not None for axis in sharding.spec[1:]):
        raise UsageError(
            f"batches are divided along the first axis only, and {sharding.spec} also divides other axes: give a "
            "PartitionSpec of one entry"
        )
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))


def to_jax_dtype(name: str, array: Array) -> Array:
    """Return an array with the dtype that JAX uses: 64-bit integers become 32-bit, unless jax_enable_x64 is set."""
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if kept == array.dtype or array.dtype.kind not in "iu":
        return array
    limits = np.iinfo(kept)
    if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
        raise UsageError(
            f"{name!r} holds numbers beyond {kept}, which JAX would cut off: set jax_enable_x64 in jax.config, or "
            "leave that field out of the cache"
        )
    return array.astype(kept)


class KeptRecords(Residence):
    """Decides whether a loader's records stay on the devices, and iterates over the loader's batches accordingly."""

    def __init__(
        self, loader: CachedLoader, sharding: jax.sharding.Sharding, resident: ResidentChoice | Resident
    ) -> None:
        self._loader, self._given = loader, resident if isinstance(resident, Resident) else None
        choice: ResidentChoice = "no" if isinstance(resident, Resident) else resident
        is_built = getattr(loader.dataset, "is_finished", True)
        never = _problem(sharding) if is_built else "the cache is not built yet"
        memory = None if never else JaxMemory(sharding)
        planned = 0 if memory is None else table_bytes(loader.dataset, memory, loader.batch_size)
        super().__init__(choice, memory, planned, never, _problem_of_auto(memory))

    def describe(self) -> str:
        return "yes, in the Resident given" if self._given is not None else super().describe()

    def begin(self) -> tuple[Iterator[Any], Callable[[], None] | None]:
        """Begin an iteration of the loader. Return its batches, and what ends it, if anything does."""
        resident = self.resident_of(self._loader) if self.is_resident else self._given
        if resident is None:
            return self._loader.iterate_ahead(), None
        resident.begin()
        try:
            return resident.pairs(self._loader), resident.end
        except BaseException:
            resident.end()
            raise


def _problem(sharding: jax.sharding.Sharding) -> str:
    if not sharding.is_fully_addressable:
        return "records cannot stay on the devices of several processes"
    if not isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
        return "records that stay on several devices need a NamedSharding"
    return ""


def _problem_of_auto(memory: JaxMemory | None) -> str:
    """Return why "auto" never keeps records on the devices; "" if that depends on the free memory."""
    if memory is None or all(device.platform == "cpu" for device in memory.sharding.device_set):
        return "the devices' memory is the host's"
    if memory.free_bytes() is None:
        return 'the devices do not say how much memory is free; resident="yes" keeps records in it'
    return ""
