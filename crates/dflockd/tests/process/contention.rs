//! Many clients, one key.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use dflockd_testkit::{Client, Server, fence, granted, together};

use super::both::Either;

const CLIENTS: usize = 64;

/// What the lock protects.
#[derive(Default)]
struct Guarded {
    inside: AtomicUsize,
    fences: Mutex<Vec<u64>>,
}

impl Guarded {
    fn enter(&self, token: &str) {
        assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
        self.fences.lock().unwrap().push(fence(token));
        thread::yield_now();
        assert_eq!(self.inside.fetch_sub(1, Ordering::SeqCst), 1, "two holders");
    }

    fn check(&self, count: usize) {
        let fences = self.fences.lock().unwrap();
        assert_eq!(fences.len(), count);
        assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    }
}

/// GUARANTEES 1, 3 and 6.
fn excludes(server: &Either) {
    const ROUNDS: usize = 15;
    let guarded = Guarded::default();
    together(CLIENTS, |_| {
        let mut client = server.connect();
        for _ in 0..ROUNDS {
            let token = client.lock("k", "60 600");
            guarded.enter(&token);
            client.check("r", "k", &token, "ok");
        }
    });
    guarded.check(CLIENTS * ROUNDS);
}

/// GUARANTEES 5 and 8: the order of the queue is the order of the grants.
fn is_fair(server: &Either) {
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| server.connect()).collect();
    for round in 0..3 {
        let mut holder = server.connect();
        let token = holder.lock("k", "60 600");
        for (place, client) in (1..).zip(&mut clients) {
            // Half of them in one step, half in two.
            if place % 2 == 0 {
                client.check("e", "k", "600", "queued");
            } else {
                client.begin("l", "k", "60 600");
                holder.wait_for_waiters("k", place);
            }
        }
        let order = Arc::new(Mutex::new(Vec::new()));
        let guarded = Arc::new(Guarded::default());
        let threads: Vec<_> = clients
            .drain(..)
            .enumerate()
            .map(|(number, mut client)| {
                let (order, guarded) = (Arc::clone(&order), Arc::clone(&guarded));
                thread::spawn(move || {
                    if number % 2 == 1 {
                        client.begin("w", "k", "60");
                    }
                    let token = granted(&client.line());
                    order.lock().unwrap().push(number);
                    guarded.enter(&token);
                    client.check("r", "k", &token, "ok");
                    client
                })
            })
            .collect();
        holder.check("r", "k", &token, "ok");
        clients = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let order = order.lock().unwrap();
        assert!(order.is_sorted(), "round {round}: {order:?}");
        guarded.check(CLIENTS);
        // The next round has them in another order.
        clients.rotate_left(7);
    }
}

#[test]
fn one_at_a_time_and_in_order() {
    for server in Either::both(&[]) {
        excludes(&server);
        is_fair(&server);
    }
}

/// A semaphore never has more holders than its limit.
#[test]
fn no_more_than_the_limit() {
    const LIMIT: usize = 3;
    let [server, _] = Either::both(&[]);
    let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    together(CLIENTS, |_| {
        let mut client = server.connect();
        for _ in 0..10 {
            let token = granted(&client.ask("sl", "s", "60 3 600"));
            let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
            most.fetch_max(now, Ordering::SeqCst);
            assert!(now <= LIMIT, "{now} holders");
            thread::yield_now();
            inside.fetch_sub(1, Ordering::SeqCst);
            client.check("sr", "s", &token, "ok");
        }
    });
    assert!(most.into_inner() > 1, "never two at once");
}

/// GUARANTEES 6, where a lost wake-up is most likely: the answer is ready while the server still
/// makes up its mind to wait for it.
#[test]
fn no_wakeup_is_lost() {
    const ROUNDS: usize = 2500;
    let server = Server::start::<&str>(&[]);
    together(8, |number| {
        let mut client = server.connect();
        // Two share a key and hand it to each other; two only ask for texts.
        let key = format!("k{}", number / 2);
        for _ in 0..ROUNDS {
            if number < 6 {
                client.lock_and_release(&key, "600 600");
            } else {
                client.stats();
            }
        }
    });
}
