//! Every form of type that `Classify` can be derived for.

#![deny(warnings)]

use idem_core::Disposition::{self, Terminal, Transient};
use idem_macros::Classify;

#[derive(Classify)]
#[classify(transient)]
struct Unit;

#[derive(Classify)]
#[classify(inner)]
struct Wrapper<E>(Box<E>);

#[derive(Classify)]
#[classify(inner)]
struct Named {
    source: Unit,
}

#[derive(Classify)]
enum Never {}

#[derive(Classify)]
#[classify(terminal)]
enum Mixed<'a, E: Clone, const N: usize>
where
    E: Copy,
{
    Plain([&'a str; N]),
    #[classify(transient)]
    Two(u8, u8),
    #[classify(inner)]
    Inner {
        r#type: E,
    },
}

#[derive(Clone, Copy, Classify)]
#[classify(terminal)]
struct Stays;

type Empty = Mixed<'static, Stays, 0>;

fn ask<E: idem_core::Classify>(error: &E) -> Disposition {
    error.disposition()
}

fn main() {
    assert_eq!(ask(&Wrapper(Box::new(Unit))), Transient);
    assert_eq!(ask(&Named { source: Unit }), Transient);
    assert_eq!(ask(&Mixed::<'_, Stays, 1>::Plain(["text"])), Terminal);
    assert_eq!(ask(&Empty::Two(1, 2)), Transient);
    assert_eq!(ask(&Empty::Inner { r#type: Stays }), Terminal);
    let _: fn(&Never) -> Disposition = ask::<Never>;
}
