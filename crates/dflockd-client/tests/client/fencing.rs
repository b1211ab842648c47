//! The storage side: each pattern with the fences of real grants, and the examples.

use std::process::Command;
use std::sync::Mutex;

use dflockd_client::fencing::{FenceGuard, MemoryFences, Stale, object, sql};
use dflockd_client::testing;
use dflockd_testkit::Dir;
use dflockd_testkit::eventually::tasks::soon;
use dflockd_testkit::process::example;
use rusqlite::{Connection, OptionalExtension, params};

use super::server::Process;

/// The fences of three successive holders of one key.
async fn fences() -> [u64; 3] {
    let server = testing::Server::start().unwrap();
    let client = server.client().await.unwrap();
    let mut fences = [0; 3];
    for fence in &mut fences {
        let guard = client.lock("k").try_acquire().await.unwrap().unwrap();
        *fence = guard.fence();
        guard.release().await.unwrap();
    }
    fences
}

#[tokio::test]
async fn in_memory() {
    let [first, second, third] = fences().await;
    assert!(first < second && second < third);
    let fences = MemoryFences::new();
    assert_eq!(fences.admit(&"k", first), Ok(()));
    assert_eq!(fences.admit(&"k", third), Ok(()));
    assert_eq!(fences.admit(&"k", second), Err(Stale { presented: second, seen: third }));
    assert_eq!(fences.admit(&"k", third), Ok(()));
}

/// Whether a write was admitted.
fn write(database: &Connection, key: &str, value: &str, fence: u64) -> bool {
    let fence = i64::try_from(fence).unwrap();
    let changed = database.execute(sql::WRITE, params![key, value.as_bytes(), fence]).unwrap();
    assert!(changed <= 1);
    changed == 1
}

fn read(database: &Connection, key: &str) -> Option<(String, u64)> {
    let row = database.query_row(sql::READ, [key], |row| {
        let (value, fence): (Vec<u8>, i64) = (row.get(0)?, row.get(1)?);
        Ok((String::from_utf8(value).unwrap(), u64::try_from(fence).unwrap()))
    });
    row.optional().unwrap()
}

#[tokio::test]
async fn in_sqlite() {
    let [first, second, third] = fences().await;
    let dir = Dir::new();
    let database = Connection::open(dir.path("db")).unwrap();
    database.execute(sql::CREATE, []).unwrap();
    database.execute(sql::CREATE, []).unwrap();
    assert_eq!(read(&database, "k"), None);
    assert!(write(&database, "k", "one", first));
    assert!(write(&database, "k", "one again", first));
    // Another process writes with a later fence.
    let other = Connection::open(dir.path("db")).unwrap();
    assert!(write(&other, "k", "three", third));
    assert!(!write(&database, "k", "two", second));
    assert!(!write(&database, "k", "one, late", first));
    assert_eq!(read(&database, "k"), Some(("three".to_owned(), third)));
    // Other keys have fences of their own.
    assert!(write(&database, "other", "x", first));
}

/// A bucket that is a table: versions are counted, puts are conditional.
struct Bucket(Mutex<Connection>);

impl Bucket {
    fn new() -> Self {
        let database = Connection::open_in_memory().unwrap();
        let table =
            "CREATE TABLE bucket (key TEXT PRIMARY KEY, tag INTEGER, fence INTEGER, value BLOB)";
        database.execute(table, []).unwrap();
        Self(Mutex::new(database))
    }

    fn value(&self, key: &str) -> String {
        let query = "SELECT value FROM bucket WHERE key = ?1";
        let value = self.0.lock().unwrap().query_row(query, [key], |row| row.get(0));
        String::from_utf8(value.unwrap()).unwrap()
    }
}

impl object::Store for Bucket {
    type Error = rusqlite::Error;

    fn head(&self, key: &str) -> Result<Option<object::Version>, Self::Error> {
        let query = "SELECT tag, fence FROM bucket WHERE key = ?1";
        let database = self.0.lock().unwrap();
        let row = database.query_row(query, [key], |row| {
            let (tag, fence): (i64, i64) = (row.get(0)?, row.get(1)?);
            Ok(object::Version { tag: tag.to_string(), fence: u64::try_from(fence).unwrap() })
        });
        row.optional()
    }

    fn put_if(
        &self,
        key: &str,
        expected: Option<&str>,
        fence: u64,
        value: &[u8],
    ) -> Result<bool, Self::Error> {
        let fence = i64::try_from(fence).unwrap();
        let statement = match expected {
            Some(_) => {
                "UPDATE bucket SET tag = tag + 1, fence = ?3, value = ?4 WHERE key = ?1 AND tag = ?2"
            }
            None => "INSERT OR IGNORE INTO bucket VALUES (?1, coalesce(?2, 1), ?3, ?4)",
        };
        let tag: Option<i64> = expected.map(|tag| tag.parse().unwrap());
        let database = self.0.lock().unwrap();
        Ok(database.execute(statement, params![key, tag, fence, value])? == 1)
    }
}

#[tokio::test]
async fn in_an_object_store() {
    let [first, second, third] = fences().await;
    let bucket = Bucket::new();
    object::put(&bucket, "o", first, b"one").unwrap();
    object::put(&bucket, "o", third, b"three").unwrap();
    let late = object::put(&bucket, "o", second, b"two");
    let stale = Stale { presented: second, seen: third };
    assert_eq!(late, Err(object::PutError::Stale(stale)));
    assert_eq!(bucket.value("o"), "three");

    // Many writers at once: whoever has the highest fence has the last word.
    std::thread::scope(|scope| {
        for writer in 0..8 {
            let bucket = &bucket;
            scope.spawn(move || {
                for round in 0..20 {
                    let fence = third + (round * 7 + writer * 3) % 31;
                    let _ = object::put(bucket, "o", fence, fence.to_string().as_bytes());
                }
            });
        }
    });
    assert_eq!(bucket.value("o"), (third + 30).to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_other_examples() {
    let server = Process::start::<&str>(&[]);
    let run = async |name: &str, args: &[&str]| {
        let mut command = Command::new(example(name));
        command.arg(server.address.to_string()).args(args);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap());
        let output = soon(name, output).await.unwrap();
        assert!(output.status.success(), "{name}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let job = run("job_lock", &[]).await;
    assert!(job.starts_with("working with fence ") && job.ends_with("\ndone\n"), "{job}");
    let leader = run("leader", &["2"]).await;
    assert!(leader.starts_with("leading with fence "), "{leader}");
    assert!(leader.ends_with("\nround 1\nround 2\nresigned\n"), "{leader}");

    let client = server.client().await;
    let _guard = client.lock("jobs/nightly").acquire().await.unwrap();
    assert_eq!(run("job_lock", &[]).await, "somebody else does it\n");
}
