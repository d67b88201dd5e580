//! A relay between a worker and its database, which understands nothing of what passes and can cut, delay or swallow it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Which way a chunk goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    ToServer,
    ToClient,
}

/// What happens to a chunk, and with it to its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection ends both ways before the chunk.
    CutBefore,
    /// The connection ends both ways within the chunk.
    CutWithin,
    /// The connection ends both ways after the chunk: it arrives, and nothing comes back.
    CutAfter,
    /// The chunk, and what comes after it this way, is late.
    Delay(Duration),
    /// The chunk and all after it this way vanish, and so does the end of the connection, for so long.
    Blackhole(Duration),
}

/// One fault, for the `chunk`-th chunk in a direction from now on, counted over all connections, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub direction: Direction,
    pub chunk: usize,
    pub fault: Fault,
}

#[derive(Default)]
struct Watch {
    plan: Option<Plan>,
    passed: [usize; 2],
    struck: bool,
}

/// Accepts connections until it is dropped.
pub struct Relay {
    pub port: u16,
    watch: Arc<Mutex<Watch>>,
    _tasks: JoinSet<()>,
}

impl Relay {
    /// A relay to `host:port`. `on_strike` is called at the instant of each fault.
    pub async fn new(server: &str, on_strike: impl Fn() + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("there is a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let watch = Arc::new(Mutex::new(Watch::default()));
        let (server, on_strike) = (server.to_owned(), Arc::new(on_strike));
        let mut tasks = JoinSet::new();
        let shared = Arc::clone(&watch);
        tasks.spawn(async move {
            // Dropped with this task, and all connections with it.
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let (server, shared, on_strike) = (server.clone(), Arc::clone(&shared), Arc::clone(&on_strike));
                connections.spawn(async move {
                    if let Ok(server) = TcpStream::connect(server).await {
                        relay(client, server, &shared, &*on_strike).await;
                    }
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { port, watch, _tasks: tasks }
    }

    /// Arms one fault, or none, and counts chunks from 0 again.
    pub fn arm(&self, plan: Option<Plan>) {
        *lock(&self.watch) = Watch { plan, ..Watch::default() };
    }

    /// Whether the armed fault has happened.
    pub fn has_struck(&self) -> bool {
        lock(&self.watch).struck
    }

    /// How many chunks have passed to the server and to the client since the last [`arm`](Self::arm).
    pub fn passed(&self) -> [usize; 2] {
        lock(&self.watch).passed
    }
}

fn lock(watch: &Mutex<Watch>) -> MutexGuard<'_, Watch> {
    watch.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this chunk is the one.
fn strikes(watch: &Mutex<Watch>, direction: Direction) -> Option<Fault> {
    let mut watch = lock(watch);
    let number = watch.passed[direction as usize];
    watch.passed[direction as usize] += 1;
    let plan = watch.plan.filter(|plan| plan.direction == direction && plan.chunk == number)?;
    watch.struck = true;
    Some(plan.fault)
}

async fn relay(client: TcpStream, server: TcpStream, watch: &Mutex<Watch>, on_strike: &(dyn Fn() + Send + Sync)) {
    // The databases' own clients do the same; else the relay's delays would be Nagle's.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let cut = CancellationToken::new();
    let up = pump(from_client, to_server, Direction::ToServer, watch, on_strike, &cut);
    let down = pump(from_server, to_client, Direction::ToClient, watch, on_strike, &cut);
    tokio::select! {
        () = cut.cancelled() => {}
        // Each way ends by itself: what is late still arrives after the other side has gone.
        ((), ()) = async { tokio::join!(up, down) } => {}
    }
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    direction: Direction,
    watch: &Mutex<Watch>,
    on_strike: &(dyn Fn() + Send + Sync),
    cut: &CancellationToken,
) {
    let mut chunk = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut chunk).await {
        let fault = strikes(watch, direction);
        if fault.is_some() {
            on_strike();
        }
        let passes = match fault {
            Some(Fault::CutBefore) => 0,
            Some(Fault::CutWithin) => length / 2,
            Some(Fault::Blackhole(time)) => {
                // Both ends live on, and this way nothing arrives: neither bytes nor the end.
                let swallow = async { while let Ok(1..) = from.read(&mut chunk).await {} };
                tokio::join!(swallow, sleep(time));
                return;
            }
            Some(Fault::Delay(time)) => {
                sleep(time).await;
                length
            }
            Some(Fault::CutAfter) | None => length,
        };
        let written = to.write_all(&chunk[..passes]).await;
        if matches!(fault, Some(Fault::CutBefore | Fault::CutWithin | Fault::CutAfter)) {
            cut.cancel();
        }
        if written.is_err() {
            break;
        }
    }
    // The end of what is to come this way.
    let _ = to.shutdown().await;
}
