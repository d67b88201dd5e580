//! A relay that reads what a client asks PostgreSQL for, and counts the statements.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::Failure;

/// What was sent, by whose it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Statements on the guard's tables.
    pub guard: u64,
    /// BEGIN, and COMMIT with the savepoint before it, each one message.
    pub transaction: u64,
    /// The handlers' own.
    pub handler: u64,
    /// The counts of duplicates, which are written once a second for all.
    pub counting: u64,
}

impl Counts {
    fn note(&mut self, text: &str) {
        let place = if text.contains("invoices") {
            &mut self.handler
        } else if text.contains("last_duplicate_at = ") {
            &mut self.counting
        } else if text.contains("processed_jobs") || text.contains("job_locks") {
            &mut self.guard
        } else {
            &mut self.transaction
        };
        *place += 1;
    }
}

impl Counts {
    /// The higher one of each.
    pub fn max(self, other: Self) -> Self {
        Self {
            guard: self.guard.max(other.guard),
            transaction: self.transaction.max(other.transaction),
            handler: self.handler.max(other.handler),
            counting: self.counting.max(other.counting),
        }
    }
}

/// Passes everything on until it is dropped.
pub struct Relay {
    /// The URL of the server, by way of the relay.
    pub url: String,
    counts: Arc<Mutex<Counts>>,
    _tasks: JoinSet<()>,
}

impl Relay {
    /// A relay to the server of `url`, which must not ask for TLS.
    pub async fn new(url: &str) -> Result<Self, Failure> {
        let (before, after) = url.split_once("://").ok_or("the URL has no scheme")?;
        let (user, after) = after.split_once('@').map_or(("", after), |(user, after)| (user, after));
        let end = after.find(['/', '?']).unwrap_or(after.len());
        let server =
            if after[..end].contains(':') { after[..end].to_owned() } else { format!("{}:5432", &after[..end]) };
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let at = if user.is_empty() { "" } else { "@" };
        let url = format!("{before}://{user}{at}127.0.0.1:{}{}", listener.local_addr()?.port(), &after[end..]);

        let counts = Arc::new(Mutex::new(Counts::default()));
        let shared = Arc::clone(&counts);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let (server, shared) = (server.clone(), Arc::clone(&shared));
                connections.spawn(async move {
                    if let Ok(server) = TcpStream::connect(server).await {
                        relay(client, server, &shared).await;
                    }
                });
            }
        });
        Ok(Self { url, counts, _tasks: tasks })
    }

    /// What was sent since the last call.
    pub fn take(&self) -> Counts {
        std::mem::take(&mut *self.counts.lock().expect("nothing panics while it is held"))
    }
}

async fn relay(mut client: TcpStream, mut server: TcpStream, counts: &Mutex<Counts>) {
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) = (client.split(), server.split());
    let up = async {
        let (mut chunk, mut reader) = (vec![0; 64 * 1024], Reader::default());
        while let Ok(length @ 1..) = from_client.read(&mut chunk).await {
            // Before it is sent, so that whoever has the answer finds it counted.
            reader.read(&chunk[..length], |text| counts.lock().expect("nothing panics while it is held").note(text));
            if to_server.write_all(&chunk[..length]).await.is_err() {
                break;
            }
        }
    };
    let down = tokio::io::copy(&mut from_server, &mut to_client);
    tokio::select! {
        () = up => {}
        _ = down => {}
    }
}

/// What one client has said so far. The first message has no type; all others have one byte of it, then their length.
#[derive(Default)]
struct Reader {
    unread: Vec<u8>,
    begun: bool,
    prepared: HashMap<Vec<u8>, String>,
    bound: String,
}

impl Reader {
    fn read(&mut self, bytes: &[u8], mut executed: impl FnMut(&str)) {
        self.unread.extend_from_slice(bytes);
        loop {
            let head = usize::from(self.begun);
            let Some(length) = self.unread.get(head..head + 4) else { return };
            let length = u32::from_be_bytes(length.try_into().expect("four bytes")) as usize;
            if self.unread.len() < head + length {
                return;
            }
            let message: Vec<u8> = self.unread.drain(..head + length).collect();
            if self.begun {
                self.message(message[0], &message[5..], &mut executed);
            }
            self.begun = true;
        }
    }

    fn message(&mut self, kind: u8, body: &[u8], executed: &mut impl FnMut(&str)) {
        let mut texts = body.split(|byte| *byte == 0);
        let mut next = || texts.next().unwrap_or_default();
        match kind {
            // Query: a text. Parse: a name and a text. Bind: a portal and a statement's name. Execute: the one bound last.
            b'Q' => executed(&String::from_utf8_lossy(next())),
            b'P' => {
                let name = next().to_vec();
                self.prepared.insert(name, String::from_utf8_lossy(next()).into_owned());
            }
            b'B' => {
                next();
                self.bound = self.prepared.get(next()).cloned().unwrap_or_default();
            }
            b'E' => executed(&self.bound),
            _ => {}
        }
    }
}
