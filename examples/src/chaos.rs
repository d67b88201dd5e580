//! When to kill which worker. Pure: the seed and the progress decide.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Kills, spread over the run.
#[derive(Debug)]
pub struct Chaos {
    rng: StdRng,
    workers: usize,
    /// The parts of the run after which a worker is killed, last first.
    due: Vec<f64>,
}

impl Chaos {
    /// About two kills for each worker: the first as soon as anything is done, since a short run is over in a moment, the
    /// others between a tenth and nine tenths of the run.
    pub fn new(workers: usize, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut due: Vec<f64> = (2..2 * workers.max(2)).map(|_| rng.random_range(0.1..0.9)).collect();
        due.push(f64::MIN_POSITIVE);
        due.sort_by(|a, b| b.total_cmp(a));
        Self { rng, workers, due }
    }

    /// Which worker to kill now, if any, when `done` of `all` messages are.
    pub fn victim(&mut self, done: u64, all: u64) -> Option<usize> {
        let part = done as f64 / all.max(1) as f64;
        self.due.pop_if(|due| *due <= part)?;
        Some(self.rng.random_range(0..self.workers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kill_falls_into_the_run() {
        for seed in 0..50 {
            let mut chaos = Chaos::new(3, seed);
            let mut kills = 0;
            for done in 0..=100 {
                while let Some(victim) = chaos.victim(done, 100) {
                    assert!(victim < 3 && (1..=90).contains(&done), "{victim} at {done}");
                    kills += 1;
                }
                assert!(done == 0 || kills > 0);
            }
            assert_eq!(kills, 5);
        }
    }
}
