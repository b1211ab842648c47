//! All members go at once; sessions that end, and sessions that are handed on.

use std::time::Duration;

use dflockd_client::{Instant, Lost};
use dflockd_testkit::eventually::tasks::{eventually, soon};

use super::super::server::crowded;
use super::nodes::{LEASE, Nodes, eventually_free, held};

const ADMIN: &str = "0123456789abcdef-admin";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_members_are_down_for_less_than_a_lease() {
    let mut nodes = Nodes::start(&[]);
    let (client, other) = (nodes.client("holder").await, nodes.client("other").await);
    let lease = LEASE * 2;
    let guard = client.lock("k").lease(lease).acquire().await.unwrap();
    let lock = other.lock("k");
    let wait = tokio::spawn(async move { lock.acquire().await.unwrap() });
    crowded(&client, "k", (1, 1)).await;
    let session = client.session();
    for at in 0..3 {
        nodes.kill(at);
    }
    // A request that is made now waits for them.
    let counter = client.counter("c");
    let added = tokio::spawn(async move { counter.add(1).await });
    nodes.start_all();
    assert_eq!(soon("an addition", added).await.unwrap().unwrap(), 1);
    soon("a renewal", guard.renew()).await.unwrap();
    assert!(guard.is_valid() && !wait.is_finished());
    assert_eq!(client.session(), session);
    let fence = guard.fence();
    guard.release().await.unwrap();
    let next = soon("the waiter's turn", wait).await.unwrap();
    assert!(next.fence() > fence);
}

/// R4: whoever can not renew in time knows it in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_is_lost_if_the_members_are_not_back_in_time() {
    let mut nodes = Nodes::start(&[]);
    let client = nodes.client("holder").await;
    let guard = client.lock("k").lease(Duration::from_secs(2)).acquire().await.unwrap();
    for at in 0..3 {
        nodes.kill(at);
    }
    let valid_until = guard.valid_until();
    let reason = soon("the loss", guard.lost()).await;
    // Expired only if this machine stood still before they were killed.
    assert!(matches!(reason, Lost::Unreachable | Lost::Expired), "{reason}");
    assert!(!guard.is_valid() && Instant::now() >= valid_until);
    nodes.start_all();
    let fence = guard.fence();
    drop(guard);
    let again = held(&client, "k").await;
    assert!(again.fence() > fence && again.is_valid());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_ended_and_another_is_handed_on() {
    let nodes = Nodes::start(&["--admin-token", ADMIN]);
    let (client, admin) = (nodes.client("holder").await, nodes.client("admin").await);
    let guard = held(&client, "k").await;
    let about = admin.inspect(b"k").await.unwrap().unwrap();
    let session = about["holders"][0]["conn"].as_u64().unwrap();
    let first = client.session().unwrap();
    admin.end_session(session, ADMIN, "a test").await.unwrap();
    assert_eq!(soon("the loss", guard.lost()).await, Lost::Session);
    eventually_free(&admin, "k").await;
    // The client begins anew.
    eventually("a new session", async || client.session().filter(|it| *it != first)).await;
    let guard = held(&client, "k").await;
    let (fence, token) = (guard.fence(), guard.token().to_owned());

    let secret = client.session().unwrap();
    let heir = nodes.builder().name("heir").attach(secret.clone()).connect().await.unwrap();
    assert_eq!(soon("the loss", guard.lost()).await, Lost::Session);
    let _token = guard.forget();
    assert_eq!(heir.session(), Some(secret));
    heir.renew_token(b"k", false, &token, LEASE).await.unwrap();
    assert!(admin.lock("k").try_acquire().await.unwrap().is_none());
    heir.release_token(b"k", false, &token).await.unwrap();
    assert!(held(&admin, "k").await.fence() > fence);
    // The first client goes on with a session of its own.
    assert_ne!(client.session(), heir.session());
    held(&client, "other").await.release().await.unwrap();
    let wrong = nodes.builder().attach("0".repeat(32)).connect().await;
    assert!(wrong.is_err());
}
