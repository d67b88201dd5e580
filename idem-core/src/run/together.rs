//! Completions of handlers that end at about the same time are written in one statement.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use tokio::sync::{Mutex as Turn, oneshot};

use crate::store::{Completion, Fenced, Store, StoreError, StoreErrorKind, Terms};

/// Most completions of one statement.
const MOST: usize = 512;

/// Collects completions while one statement is on its way, for the next one. Nobody waits for company: whoever finds no
/// statement on its way sends one at once.
#[derive(Default)]
pub(super) struct Together {
    waiting: Mutex<VecDeque<Waiting>>,
    /// Held by whoever has a statement on its way.
    turn: Turn<()>,
}

struct Waiting {
    completions: Vec<Completion>,
    answer: oneshot::Sender<Result<Vec<Fenced>, StoreError>>,
}

impl Together {
    /// Marks jobs as completed, as [`Store::complete`] does.
    ///
    /// # Cancel safety
    /// The completions may be written all the same. Others that were in the same statement are told that the store did not
    /// answer, and ask again.
    pub async fn complete(
        &self,
        store: &dyn Store,
        terms: &Terms,
        completions: Vec<Completion>,
    ) -> Result<Vec<Fenced>, StoreError> {
        let (answer, mut answered) = oneshot::channel();
        self.waiting().push_back(Waiting { completions, answer });
        let _turn = self.turn.lock().await;
        loop {
            // Mine may have gone with somebody else's statement, or with the last one of mine.
            match answered.try_recv() {
                Ok(answer) => return answer,
                Err(oneshot::error::TryRecvError::Closed) => {
                    return Err(StoreError::new(StoreErrorKind::Unavailable, "the completion was cut off"));
                }
                Err(oneshot::error::TryRecvError::Empty) => {}
            }
            let batch = self.take();
            let all: Vec<_> = batch.iter().flat_map(|waiting| waiting.completions.iter().cloned()).collect();
            let result = store.complete(terms, &all).await;
            share(batch, result);
        }
    }

    fn take(&self) -> Vec<Waiting> {
        let mut waiting = self.waiting();
        let mut batch = Vec::new();
        let mut count = 0;
        while let Some(next) = waiting.front() {
            if count > 0 && count + next.completions.len() > MOST {
                break;
            }
            count += next.completions.len();
            batch.extend(waiting.pop_front());
        }
        batch
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, VecDeque<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives each its part of the answer. Whoever has stopped listening meanwhile does not need it.
fn share(batch: Vec<Waiting>, result: Result<Vec<Fenced>, StoreError>) {
    match result {
        Ok(fenced) => {
            let mut fenced = fenced.into_iter();
            for Waiting { completions, answer } in batch {
                answer.send(Ok(fenced.by_ref().take(completions.len()).collect())).ok();
            }
        }
        Err(error) => {
            for Waiting { answer, .. } in batch {
                answer.send(Err(error.again())).ok();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::key::{ConsumerName, EventKey};
    use crate::machine::{Decision, Token};
    use crate::store::{ClaimRequest, MemoryStore, Returned};

    #[tokio::test]
    async fn each_gets_its_own_answer() {
        let store = Arc::new(MemoryStore::default());
        let terms = Terms {
            consumer: ConsumerName::new("c").unwrap(),
            lease: Duration::from_secs(30),
            max_attempts: 3,
            owner: "me".into(),
        };
        let request = |number: u128| ClaimRequest {
            key: EventKey::from_parts([number.to_string()]).unwrap(),
            token: Token(uuid::Uuid::from_u128(number)),
            payload: None,
            message_id: "m".into(),
        };
        let requests: Vec<_> = (0..20).map(request).collect();
        for answer in store.claim(&terms, &requests).await.unwrap() {
            assert!(matches!(answer.decision, Decision::Run(_)));
        }
        let together = Together::default();
        let writes = requests.into_iter().enumerate().map(|(number, mut request)| {
            if number % 3 == 0 {
                request.token = Token(uuid::Uuid::from_u128(999));
            }
            together.complete(
                &*store,
                &terms,
                vec![Completion { request, attempt: 1, fence: 1, returned: Returned::default() }],
            )
        });
        let answers = futures_util::future::join_all(writes).await;
        for (number, answer) in answers.into_iter().enumerate() {
            let expected = if number % 3 == 0 { Fenced::LeaseLost } else { Fenced::Applied };
            assert_eq!(answer.unwrap(), [expected], "{number}");
        }
    }
}
