//! Help for the storage side: how to refuse the write of a holder whose lock is gone.
//!
//! No lock service can stop a process that is paused between checking its lock and writing. The storage can:
//! it remembers the highest fence it has seen per key and refuses everything below. The pieces here are meant
//! to be copied into use.

use std::collections::HashMap;
use std::hash::Hash;

use parking_lot::Mutex;

/// The write came with a fence that is not the highest seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("fence {presented} is stale, {seen} was seen")]
pub struct Stale {
    /// What the writer presented.
    pub presented: u64,
    /// The highest so far.
    pub seen: u64,
}

/// Something that admits writes only with the highest fence it has seen.
pub trait FenceGuard<K: ?Sized> {
    /// Admits a write with `fence`, or refuses it because a later holder was here.
    ///
    /// Admitting and writing must be one step for the storage (a transaction, a conditional request): a fence that
    /// is checked first and written under later protects nothing.
    ///
    /// # Errors
    ///
    /// If a higher fence was seen.
    fn admit(&self, key: &K, fence: u64) -> Result<(), Stale>;
}

/// Fences in memory, for a storage that is one process.
#[derive(Debug, Default)]
pub struct MemoryFences<K>(Mutex<HashMap<K, u64>>);

impl<K> MemoryFences<K> {
    /// None seen.
    #[must_use]
    pub fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }
}

impl<K: Eq + Hash + Clone> FenceGuard<K> for MemoryFences<K> {
    fn admit(&self, key: &K, fence: u64) -> Result<(), Stale> {
        let mut seen = self.0.lock();
        let highest = seen.entry(key.clone()).or_insert(fence);
        if fence < *highest {
            return Err(Stale { presented: fence, seen: *highest });
        }
        *highest = fence;
        Ok(())
    }
}

/// SQL: a column for the fence beside the data, and the condition in the statement that writes. No row changed
/// means that the fence was stale.
///
/// The fence is stored as a signed 64-bit integer; fences are nanoseconds since 1970 at least and stay below
/// 2^63 for some centuries.
pub mod sql {
    /// A table for data protected by fences.
    pub const CREATE: &str = "CREATE TABLE IF NOT EXISTS fenced (
    key TEXT PRIMARY KEY,
    value BLOB NOT NULL,
    fence INTEGER NOT NULL
)";

    /// Writes `?2` under `?1` with the fence `?3`, unless a higher one was here. Changes one row or none.
    pub const WRITE: &str = "INSERT INTO fenced (key, value, fence) VALUES (?1, ?2, ?3)
ON CONFLICT (key) DO UPDATE SET value = excluded.value, fence = excluded.fence
WHERE fenced.fence <= excluded.fence";

    /// Reads the value and the fence under `?1`.
    pub const READ: &str = "SELECT value, fence FROM fenced WHERE key = ?1";
}

/// Object stores: the fence in the object's metadata, and a conditional put.
///
/// 1. Read the object's metadata and its version (ETag, generation).
/// 2. If its fence is higher than ours, stop: [`Stale`].
/// 3. Put the object with our fence on condition that the version is still the one read (`If-Match`,
///    `ifGenerationMatch`; `If-None-Match: *` for a new one). If the condition fails, begin again.
///
/// [`put`](object::put) does this for any store that implements [`Store`](object::Store).
pub mod object {
    use super::Stale;

    /// The name of the metadata entry.
    pub const METADATA: &str = "dflockd-fence";

    /// What is known of an object.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Version {
        /// ETag or generation.
        pub tag: String,
        /// The fence in its metadata; 0 if there is none.
        pub fence: u64,
    }

    /// The two calls needed of an object store.
    pub trait Store {
        /// What the store itself can fail with.
        type Error;

        /// The version of an object, if it exists.
        ///
        /// # Errors
        ///
        /// If the store can not be asked.
        fn head(&self, key: &str) -> Result<Option<Version>, Self::Error>;

        /// Writes if the object is still at `expected` (none: if it does not exist). False if it is not.
        ///
        /// # Errors
        ///
        /// If the store can not be asked.
        fn put_if(
            &self,
            key: &str,
            expected: Option<&str>,
            fence: u64,
            value: &[u8],
        ) -> Result<bool, Self::Error>;
    }

    /// Why a put did not happen.
    #[derive(Debug, PartialEq, Eq, thiserror::Error)]
    pub enum PutError<E> {
        /// A later holder was here.
        #[error(transparent)]
        Stale(#[from] Stale),
        /// The store failed.
        #[error("the store failed")]
        Store(E),
    }

    /// Writes with a fence.
    ///
    /// # Errors
    ///
    /// If the fence is stale or the store fails.
    pub fn put<S: Store>(
        store: &S,
        key: &str,
        fence: u64,
        value: &[u8],
    ) -> Result<(), PutError<S::Error>> {
        loop {
            let version = store.head(key).map_err(PutError::Store)?;
            if let Some(version) = &version
                && version.fence > fence
            {
                return Err(Stale { presented: fence, seen: version.fence }.into());
            }
            let expected = version.as_ref().map(|version| version.tag.as_str());
            if store.put_if(key, expected, fence, value).map_err(PutError::Store)? {
                return Ok(());
            }
        }
    }
}

/// HTTP: the client sends the lock and its fence, the service answers 412 if it has seen a higher one.
pub mod http {
    /// The lock's key.
    pub const KEY: &str = "Dflockd-Key";
    /// The fence, in decimal.
    pub const FENCE: &str = "Dflockd-Fence";
    /// The status for a stale fence: 412 Precondition Failed.
    pub const STALE: u16 = 412;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_highest_fence_writes() {
        let fences = MemoryFences::new();
        assert_eq!(fences.admit(&"a", 5), Ok(()));
        assert_eq!(fences.admit(&"a", 5), Ok(()));
        assert_eq!(fences.admit(&"a", 7), Ok(()));
        assert_eq!(fences.admit(&"a", 6), Err(Stale { presented: 6, seen: 7 }));
        assert_eq!(fences.admit(&"b", 1), Ok(()));
    }

    /// Tag, fence and value.
    type Object = (u64, u64, Vec<u8>);

    #[derive(Default)]
    struct Bucket {
        objects: Mutex<HashMap<String, Object>>,
        /// Somebody else writes between head and put, so often.
        races: Mutex<u32>,
    }

    impl object::Store for Bucket {
        type Error = ();

        fn head(&self, key: &str) -> Result<Option<object::Version>, ()> {
            let objects = self.objects.lock();
            Ok(objects
                .get(key)
                .map(|(tag, fence, _)| object::Version { tag: tag.to_string(), fence: *fence }))
        }

        fn put_if(
            &self,
            key: &str,
            expected: Option<&str>,
            fence: u64,
            value: &[u8],
        ) -> Result<bool, ()> {
            let mut objects = self.objects.lock();
            let mut races = self.races.lock();
            if *races > 0 {
                *races -= 1;
                let object = objects.entry(key.to_owned()).or_insert((0, 0, Vec::new()));
                object.0 += 1;
                object.1 += 10;
            }
            let tag = objects.get(key).map(|(tag, ..)| tag.to_string());
            if tag.as_deref() != expected {
                return Ok(false);
            }
            let next = tag.and_then(|tag| tag.parse::<u64>().ok()).unwrap_or_default() + 1;
            objects.insert(key.to_owned(), (next, fence, value.to_vec()));
            Ok(true)
        }
    }

    #[test]
    fn an_object_keeps_the_highest_fence() {
        let bucket = Bucket::default();
        assert_eq!(object::put(&bucket, "o", 5, b"five"), Ok(()));
        *bucket.races.lock() = 1;
        let stale = Stale { presented: 6, seen: 15 };
        assert_eq!(object::put(&bucket, "o", 6, b"six"), Err(stale.into()));
        assert_eq!(object::put(&bucket, "o", 20, b"twenty"), Ok(()));
        assert_eq!(bucket.objects.lock()["o"].2, b"twenty");
    }
}
