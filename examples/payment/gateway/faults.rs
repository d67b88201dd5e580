//! Which calls go wrong, and how.

use std::time::Duration;

use clap::Args;
use idem_examples::cli::part;
use rand::Rng;

/// How often calls go wrong.
#[derive(Args, Clone, Copy, Debug)]
pub struct Faults {
    /// The part of the calls that are never answered; every second of them has charged
    #[arg(long, value_name = "PART", default_value_t = 0.05, value_parser = part)]
    pub timeout_rate: f64,
    /// The part of the calls that are refused with 503, without a charge
    #[arg(long, value_name = "PART", default_value_t = 0.02, value_parser = part)]
    pub fail_rate: f64,
    /// The part of the calls that charge and answer late
    #[arg(long, value_name = "PART", default_value_t = 0.02, value_parser = part)]
    pub late_rate: f64,
}

/// What happens to one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Charges and answers.
    None,
    /// Charges, but never answers.
    SilentAfterCharge,
    /// Neither charges nor answers.
    SilentBeforeCharge,
    /// Answers 503 without a charge.
    Unavailable,
    /// Charges, and answers after a while.
    Late(Duration),
}

impl Faults {
    /// Draws what happens to the next call.
    pub fn draw(&self, rng: &mut impl Rng) -> Fault {
        let drawn: f64 = rng.random();
        let failing = self.timeout_rate + self.fail_rate;
        match drawn {
            drawn if drawn < self.timeout_rate / 2.0 => Fault::SilentAfterCharge,
            drawn if drawn < self.timeout_rate => Fault::SilentBeforeCharge,
            drawn if drawn < failing => Fault::Unavailable,
            // Some within the client's patience, some beyond it.
            drawn if drawn < failing + self.late_rate => Fault::Late(Duration::from_millis(rng.random_range(20..400))),
            _ => Fault::None,
        }
    }

    /// The same as arguments of the program.
    pub fn arguments(&self) -> Vec<String> {
        [("--timeout-rate", self.timeout_rate), ("--fail-rate", self.fail_rate), ("--late-rate", self.late_rate)]
            .into_iter()
            .flat_map(|(name, rate)| [name.to_owned(), rate.to_string()])
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn calls_go_wrong_as_often_as_asked() {
        let faults = Faults { timeout_rate: 0.2, fail_rate: 0.1, late_rate: 0.3 };
        let mut rng = StdRng::seed_from_u64(1);
        let drawn: Vec<Fault> = (0..10_000).map(|_| faults.draw(&mut rng)).collect();
        let part = |wanted: fn(&Fault) -> bool| drawn.iter().filter(|fault| wanted(fault)).count() as f64 / 10_000.0;
        let close = |found: f64, wanted: f64| assert!((found - wanted).abs() < 0.02, "{found} instead of {wanted}");
        close(part(|fault| *fault == Fault::SilentAfterCharge), 0.1);
        close(part(|fault| *fault == Fault::SilentBeforeCharge), 0.1);
        close(part(|fault| *fault == Fault::Unavailable), 0.1);
        close(part(|fault| matches!(fault, Fault::Late(_))), 0.3);
        close(part(|fault| *fault == Fault::None), 0.4);
    }
}
